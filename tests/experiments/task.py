"""Addition with written-out steps, with parts of the training traces spoiled at known positions.

A clean sequence, 4 digits in base 4 (10 tokens of prompt, 27 of trace):

    3 1 0 2 + 0 3 2 3 =   2 3 0 1 ;   0 2 1 3 ;   1 3 0 0 ;   3 0 1 0 ;   # 1 0 0 3 1 .
          prompt          steps from the lowest digits up: two digits,    the answer, last carry
                          carry in, digit of the sum                      and highest digit first

Base 4, because a model that costs 20 ms a step learns its addition table in 600 steps; that of base 10 takes thousands.

Spoiled traces have, with known probabilities, two kinds of planted noise. The answer stays right, as in traces that
were selected by their answer.

    wrong       a step's digit of the sum is another one, drawn at random: 1 token
    irrelevant  a part of 6 tokens before a step, `~`, four random digits, `;`

So most planted tokens cannot be predicted. Systematic noise has the same two kinds, but a model learns to expect it,
like errors that many real traces share:

    wrong       the digit of the sum plus 1 (modulo the base), more often than the right digit
    irrelevant  always `~ 0 1 2 3 ;`, before half of the steps

Traces can also be entirely wrong, as solutions with an error mostly stay wrong: a share of them is by an author who
writes the digit plus 1 (systematic) or another digit (random) in four of five steps, and the answer that follows from
these. All tokens of such a trace count as planted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import pad

from vcore_ds.method.weights import segment_sum

NUM_DIGITS = 4
BASE = 4
PLUS, EQUALS, END_OF_STEP, IRRELEVANT, ANSWER, END = range(BASE, BASE + 6)
VOCABULARY = BASE + 6
PROMPT_LENGTH = 2 * NUM_DIGITS + 2
ANSWER_LENGTH = NUM_DIGITS + 3  # `#`, the digits with the last carry, the end
CLEAN_LENGTH = 5 * NUM_DIGITS + ANSWER_LENGTH  # supervised tokens

SOUND, WRONG_STEP, IRRELEVANT_PART, WRONG_TRACE = range(4)

RANDOM_NOISE = {"wrong": 0.2, "irrelevant": 0.3, "systematic": False}
SYSTEMATIC_NOISE = {"wrong": 0.55, "irrelevant": 0.5, "systematic": True}
CLEAN = {"wrong": 0.0, "irrelevant": 0.0}
ERRING_AUTHOR = {"wrong": 0.8, "irrelevant": 0.0}  # arguments of `TraceStream`

Trace = tuple[list[int], list[int]]  # tokens, and the kind of each one after the prompt


@dataclass(frozen=True)
class Traces:
    """Right-padded traces; B sequences of at most T tokens, N supervised tokens in row-major order."""

    input_ids: Tensor  # `[B, T]`
    supervised: Tensor  # bool `[B, T - 1]`, whether the next token is one of the trace
    sequence_index: Tensor  # `[N]`, the row of each supervised token
    planted: Tensor  # `[N]`, SOUND, WRONG_STEP, IRRELEVANT_PART or WRONG_TRACE

    def __len__(self) -> int:
        return len(self.input_ids)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each trace's tokens of values `[N]`, `[B]`."""
        num_tokens = segment_sum(torch.ones_like(values), self.sequence_index, len(self))
        return segment_sum(values, self.sequence_index, len(self)) / num_tokens

    def wrong(self) -> Tensor:
        """Whether each trace is by an author who errs, bool `[B]`."""
        return self.mean((self.planted == WRONG_TRACE).float()) > 0


class TraceStream:
    """An endless stream of traces, determined by its seed."""

    def __init__(
        self,
        seed: int | list[int],
        *,
        wrong: float = 0.2,
        irrelevant: float = 0.3,
        systematic: bool = False,
        wrong_traces: float | None = None,
        pool_size: int | None = None,
        draws: int | list[int] | None = None,
    ):
        """`wrong` and `irrelevant` are probabilities of a step and before a step. With `wrong_traces` that share of the
        traces is by an author who errs, and all others are clean. `pool_size` different traces are drawn as
        `vcore_ds.data` draws a probe, by a generator seeded with `draws`; None for ever new traces."""
        self._random = np.random.default_rng(seed)
        self._wrong, self._irrelevant, self._systematic = wrong, irrelevant, systematic
        self._wrong_traces = wrong_traces
        self._pool = None if pool_size is None else [self._trace(i / pool_size) for i in range(pool_size)]
        self._kept = np.arange(pool_size or 0)
        if draws is not None:
            self._random = np.random.default_rng(draws)

    def take(self, num_sequences: int) -> Traces:
        if self._pool is None:
            return _batch([self._trace() for _ in range(num_sequences)])
        rows: list[Trace] = []
        while len(rows) < num_sequences:
            size = min(num_sequences - len(rows), len(self._kept))
            drawn = self._kept[self._random.choice(len(self._kept), size, replace=False)]
            rows += [self._pool[i] for i in drawn]
        return _batch(rows)

    def keep(self, chosen: ArrayLike) -> None:
        """Draw only from these traces of the pool from now on, whatever was kept before."""
        self._kept = np.asarray(chosen)

    def whole_pool(self) -> Traces:
        """Every trace of the pool once, kept or not, in the order of their creation."""
        assert self._pool is not None
        return _batch(self._pool)

    def _trace(self, place: float | None = None) -> Trace:
        """`place` is the position in a pool, from 0 to 1: wrong traces come first, so that their number is exact."""
        random = self._random
        errs = True
        if self._wrong_traces is not None:
            errs = (random.random() if place is None else place) < self._wrong_traces
        a, b = (list(map(int, random.integers(0, BASE, NUM_DIGITS))) for _ in range(2))  # highest digit first
        tokens, kinds = [*a, PLUS, *b, EQUALS], []
        carry, total = 0, []
        for x, y in zip(reversed(a), reversed(b), strict=True):
            if random.random() < self._irrelevant:
                inner = [0, 1, 2, 3] if self._systematic else map(int, random.integers(0, BASE, 4))
                tokens += [IRRELEVANT, *inner, END_OF_STEP]
                kinds += [IRRELEVANT_PART] * 6
            digit = (x + y + carry) % BASE
            is_wrong = random.random() < self._wrong and errs
            shift = 1 if self._systematic else int(random.integers(1, BASE)) if is_wrong else 0
            written = (digit + shift) % BASE if is_wrong else digit
            tokens += [x, y, carry, written, END_OF_STEP]
            kinds += [SOUND, SOUND, SOUND, WRONG_STEP if is_wrong else SOUND, SOUND]
            carry = (x + y + carry) // BASE
            total.append(digit if self._wrong_traces is None else written)
        tokens += [ANSWER, carry, *reversed(total), END]
        kinds += [SOUND] * ANSWER_LENGTH
        return tokens, [WRONG_TRACE] * len(kinds) if errs and self._wrong_traces is not None else kinds


def _batch(rows: Sequence[Trace]) -> Traces:
    longest = max(len(tokens) for tokens, _ in rows)
    input_ids = torch.full((len(rows), longest), END)
    planted = torch.full((len(rows), longest), -1)
    for row, (tokens, kinds) in enumerate(rows):
        input_ids[row, : len(tokens)] = torch.tensor(tokens)
        planted[row, PROMPT_LENGTH : len(tokens)] = torch.tensor(kinds)
    supervised = planted[:, 1:] >= 0
    index = torch.arange(len(rows))[:, None].expand_as(supervised)[supervised]
    return Traces(input_ids, supervised, index, planted[:, 1:][supervised])


def join(first: Traces, second: Traces) -> Traces:
    """Concatenate two batches."""
    longest = max(first.input_ids.shape[1], second.input_ids.shape[1])

    def both(name: str, length: int, padding: int) -> Tensor:
        tensors = [getattr(traces, name) for traces in (first, second)]
        return torch.cat([pad(tensor, (0, length - tensor.shape[1]), value=padding) for tensor in tensors])

    return Traces(
        both("input_ids", longest, END),
        both("supervised", longest - 1, False),
        torch.cat([first.sequence_index, second.sequence_index + len(first)]),
        torch.cat([first.planted, second.planted]),
    )


def answers_match(generated: Tensor, traces: Traces) -> Tensor:
    """Whether each generated `[B, T']` answer, from `#` to the first END, equals that of the trace, bool `[B]`."""
    matches = []
    for row, continuation in enumerate(generated.tolist()):
        tokens = traces.input_ids[row].tolist()
        end = tokens.index(END) + 1
        stop = continuation.index(END) + 1 if END in continuation else 0
        matches.append(stop > 0 and continuation[:stop][-ANSWER_LENGTH:] == tokens[end - ANSWER_LENGTH : end])
    return torch.tensor(matches)


def measure_trace_separation(scores: Tensor, wrong: Tensor) -> float:
    """AUC of scores `[B]` of traces: probability that a right one is above a wrong one, ties counting half. NaN if all
    are right or all are wrong."""
    difference = scores[~wrong][:, None] - scores[wrong][None, :]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())
