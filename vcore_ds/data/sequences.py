"""Sequences by position: what every data set offers."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

from vcore_ds.data.tokenization import TokenizedSequence


class TokenizedSequences(Sequence[TokenizedSequence]):
    """Sequences that are read when they are indexed."""

    @abstractmethod
    def sequence_at(self, i: int) -> TokenizedSequence:
        """The sequence at a position, from 0 to less than the number of sequences."""

    @overload
    def __getitem__(self, index: int) -> TokenizedSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenizedSequence]: ...
    def __getitem__(self, index: int | slice) -> TokenizedSequence | list[TokenizedSequence]:
        """The sequence at a position, which may count from the end; a list of them for a slice."""
        positions = range(len(self))[index]
        if isinstance(positions, range):
            return [self.sequence_at(i) for i in positions]
        return self.sequence_at(positions)
