"""Addition with written-out steps, in which some authors err.

4 digits in base 4, of 10 tokens of prompt and 27 of trace:

    3 1 0 2 + 0 3 2 3 =   2 3 0 1 ;   0 2 1 3 ;   1 3 0 0 ;   3 0 1 0 ;   # 1 0 0 3 1 .
          prompt          steps from the lowest digits up: two digits,    the answer, last carry
                          carry in, digit of the sum                      and highest digit first

Base 4, because a model that costs 20 ms a step learns its addition table in 600 steps; that of base 10 takes thousands.

A share of the traces is by an author who writes the digit plus 1 (systematic) or another digit (random) in four of five
steps, and the answer that follows from these, as solutions with an error mostly stay wrong.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

NUM_DIGITS = 4
BASE = 4
PLUS, EQUALS, END_OF_STEP, UNUSED, ANSWER, END = range(BASE, BASE + 6)
VOCABULARY = BASE + 6
PROMPT_LENGTH = 2 * NUM_DIGITS + 2
ANSWER_LENGTH = NUM_DIGITS + 3  # `#`, the digits with the last carry, the end
TRACE_LENGTH = 5 * NUM_DIGITS + ANSWER_LENGTH  # supervised tokens
ERROR_RATE = 0.8  # of the steps of an author who errs


@dataclass(frozen=True)
class Traces:
    """B traces of one length, with N = B * TRACE_LENGTH supervised tokens."""

    input_ids: Tensor  # `[B, PROMPT_LENGTH + TRACE_LENGTH]`
    wrong: Tensor  # bool `[B]`, whether the author errs

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def sequence_index(self) -> Tensor:
        """The row of each supervised token, `[N]`."""
        return torch.arange(len(self)).repeat_interleave(TRACE_LENGTH)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each trace's tokens of values `[N]`, `[B]`."""
        return values.view(len(self), TRACE_LENGTH).mean(1)


class TraceStream:
    """An endless stream of traces, determined by its seed."""

    def __init__(
        self,
        seed: int | list[int],
        *,
        wrong_traces: float = 0.0,
        systematic: bool = False,
        pool_size: int | None = None,
        draws: int | list[int] | None = None,
    ):
        """`wrong_traces`: share of traces by an author who errs. `pool_size` different traces are drawn as
        `vcore_ds.data` draws a probe, by a generator seeded with `draws`; None for ever new traces."""
        self._random = np.random.default_rng(seed)
        self._wrong_traces, self._systematic = wrong_traces, systematic
        self._pool = None if pool_size is None else [self._trace(i / pool_size) for i in range(pool_size)]
        self._kept = np.arange(pool_size or 0)
        if draws is not None:
            self._random = np.random.default_rng(draws)

    def take(self, num_sequences: int) -> Traces:
        if self._pool is None:
            return _batch([self._trace() for _ in range(num_sequences)])
        rows: list[tuple[list[int], bool]] = []
        while len(rows) < num_sequences:
            size = min(num_sequences - len(rows), len(self._kept))
            rows += [self._pool[i] for i in self._kept[self._random.choice(len(self._kept), size, replace=False)]]
        return _batch(rows)

    def keep(self, chosen: ArrayLike) -> None:
        """Draw only from these traces of the pool from now on, whatever was kept before."""
        self._kept = np.asarray(chosen)

    def whole_pool(self) -> Traces:
        """Every trace of the pool once, kept or not, in the order of their creation."""
        assert self._pool is not None
        return _batch(self._pool)

    def _trace(self, place: float | None = None) -> tuple[list[int], bool]:
        """Tokens, and whether the author errs. `place` is the position in a pool, from 0 to 1: wrong traces come first,
        so that their number is exact."""
        random = self._random
        is_wrong = False
        if self._wrong_traces > 0:
            is_wrong = (random.random() if place is None else place) < self._wrong_traces
        a, b = (list(map(int, random.integers(0, BASE, NUM_DIGITS))) for _ in range(2))  # highest digit first
        tokens, total, carry = [*a, PLUS, *b, EQUALS], [], 0
        for x, y in zip(reversed(a), reversed(b), strict=True):
            random.random()  # so that the numbers that follow are those of the recorded results
            errs, shift = random.random() < ERROR_RATE and is_wrong, 0
            if errs:
                shift = 1 if self._systematic else int(random.integers(1, BASE))
            total.append((x + y + carry + shift) % BASE)
            tokens += [x, y, carry, total[-1], END_OF_STEP]
            carry = (x + y + carry) // BASE
        return [*tokens, ANSWER, carry, *reversed(total), END], is_wrong


def _batch(rows: list[tuple[list[int], bool]]) -> Traces:
    tokens, wrong = zip(*rows, strict=True)
    return Traces(torch.tensor(tokens), torch.tensor(wrong))


def join(first: Traces, second: Traces) -> Traces:
    """Concatenate two batches."""
    return Traces(torch.cat([first.input_ids, second.input_ids]), torch.cat([first.wrong, second.wrong]))


def answers_match(generated: Tensor, traces: Traces) -> Tensor:
    """Whether each generated `[B, T']` answer, from `#` to the first END, equals that of the trace, bool `[B]`."""
    matches = []
    for continuation, right in zip(generated.tolist(), traces.input_ids[:, -ANSWER_LENGTH:].tolist(), strict=True):
        stop = continuation.index(END) + 1 if END in continuation else 0
        matches.append(stop > 0 and continuation[:stop][-ANSWER_LENGTH:] == right)
    return torch.tensor(matches)


def measure_trace_separation(scores: Tensor, wrong: Tensor) -> float:
    """AUC of scores `[B]` of traces: probability that a right one is above a wrong one, ties counting half. NaN if all
    are right or all are wrong."""
    difference = scores[~wrong][:, None] - scores[wrong][None, :]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())
