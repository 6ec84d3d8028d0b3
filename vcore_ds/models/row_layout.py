"""Which sequences a batch's rows hold, as attention and other functions of a layer need to know it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vcore_ds.data.batches import to_device


@dataclass(frozen=True)
class RowLayout:
    """The sequences in a batch's rows, and the sequence-parallel degree; made once for each pass."""

    lengths: Sequence[Sequence[int]]
    """Tokens of the sequences in each row, in order; T together. Padding counts as a sequence."""
    sequence_parallel: int
    """Sequence-parallel degree: each rank of a group has `t = T / sequence_parallel` columns of its rows."""
    ends: Tensor
    """int32 `[num_sequences + 1]`, on the device: 0, and where each sequence ends in the rows put end to end."""

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], sequence_parallel: int, device: torch.device) -> "RowLayout":
        """The layout with its tensor, made on the host: no layer waits for the device to learn it."""
        flat = torch.tensor([0, *(n for row in lengths for n in row)], dtype=torch.int32)
        return cls(lengths, sequence_parallel, to_device(flat.cumsum(0, dtype=torch.int32), device))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(n for row in self.lengths for n in row)

    @property
    def is_one_sequence_a_row(self) -> bool:
        """Whether no row is packed."""
        return all(len(row) == 1 for row in self.lengths)

    def in_chunks(self, num_tokens: int) -> "RowLayout":
        """That of the sequences cut into chunks of so many tokens, none of which sees another (Llama 4)."""
        if self.longest <= num_tokens:
            return self
        lengths = [
            [min(num_tokens, n - start) for n in row for start in range(0, n, num_tokens)] for row in self.lengths
        ]
        return RowLayout.of(lengths, self.sequence_parallel, self.ends.device)

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of what can be computed together: all rows where each is one sequence, else a sequence."""
        if self.is_one_sequence_a_row:
            yield slice(None), slice(None)
            return
        for row, lengths in enumerate(self.lengths):
            start = 0
            for n in lengths:
                yield slice(row, row + 1), slice(start, start + n)
                start += n
