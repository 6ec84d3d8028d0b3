"""Measurements of one optimizer step: sums on a rank, totals over ranks, and the line that is written."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.data.batches import Batch
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import peak_memory
from vcore_ds.distributed.position import mark
from vcore_ds.method.objective import GlobalCounts, effective_sample_size, sequence_shares, utility_moments
from vcore_ds.method.weights import GibbsWeights, Tokens, segment_sum
from vcore_ds.training import console
from vcore_ds.training.token_records import (
    MOST_PROMPT_TOKENS,
    MOST_TOKENS,
    Kind,
    SequenceTokens,
    TokenRecord,
    record_path,
    write_record,
)


def split_into_sequences(
    result: "MicroBatchResult", uniform_shares: Tensor, alpha: Tensor | float
) -> Iterator[SequenceTokens]:
    """Yield the sequences of a micro-batch that have supervised tokens. Synchronises with the device.
    `uniform_shares`: `[num_sequences]`, see `SequenceTokens`; `alpha`: a scalar or `[num_sequences]`."""
    tokens = result.tokens
    alphas = torch.as_tensor(alpha).double().cpu().expand(tokens.num_sequences)
    columns = [values.double().tolist() for values in (result.shares, uniform_shares, alphas)]
    # Not strict: an idle batch has a sequence without an id.
    values = zip(result.batch.sequence_ids, *columns, strict=False)
    measured = {"losses": tokens.losses, "utilities": tokens.utilities, "weights": result.weights.weights}
    for sequence_values, arrays in zip(values, split_columns(result.batch, **measured), strict=True):
        if len(arrays["token_ids"]):
            yield SequenceTokens(*sequence_values, **arrays)


def split_columns(batch: Batch, **columns: Tensor | None) -> Iterator[dict[str, Any]]:
    """Yield the fields of `SequenceTokens` for each sequence id of a micro-batch, from `columns` `[N]` of its
    supervised tokens. Synchronises with the device."""
    supervised, index = batch.supervised(), batch.sequence_index().numpy()
    arrays = {name: None if column is None else column.float().cpu().numpy() for name, column in columns.items()}
    arrays["positions"] = batch.position_ids()[:, 1:][supervised].int().numpy()
    arrays["token_ids"] = batch.labels[:, 1:][supervised].int().numpy()
    for number, prompt in enumerate(batch.prompts()):
        members = index == number
        fields = {name: None if array is None else array[members] for name, array in arrays.items()}
        yield fields | {"prompt_ids": prompt[-MOST_PROMPT_TOKENS:].int().numpy()}


def write_or_warn(folder: Path, record: TokenRecord, kind: Kind) -> None:
    """Write a record into the run's folder, on rank 0. One that cannot be written is a warning: rank 0 must not exit
    while the others train."""
    if not layout.is_first() or not record.sequences:
        return
    try:
        write_record(folder, record, kind)
    except OSError as error:
        console.warn(f"{record_path(folder, record.step, kind)} cannot be written ({error.strerror})")


def gather_record(
    step: int, local: Sequence[SequenceTokens], sequence_parallel: int, first_trusted_id: int | None, seed: int
) -> TokenRecord:
    """Gather the record of an optimizer step on every rank, the same at any world size. A collective. `local`: this
    rank's sequences of the main batch; `sequence_parallel`: size of a group, whose ranks hold the same sequences;
    `first_trusted_id`: as in `TokenRecord`; `seed`: of the run."""
    mark("token record")
    # Ranks of a sequence-parallel group hold the same sequences; one of them contributes.
    local = local if layout.rank("sequence", sequence_parallel) == 0 else []
    sizes = layout.gather_objects("shards", [(sequence.sequence_id, len(sequence)) for sequence in local])
    entries = sorted((i, n, rank, k) for rank, pairs in enumerate(sizes) for k, (i, n) in enumerate(pairs))
    lengths = [n for _, n, _, _ in entries]
    rng = generator(Stream.TOKEN_RECORDS, seed, step)
    chosen = {entries[i][2:] for i in choose_sequences(lengths, rng, MOST_TOKENS)}
    rank = layout.rank("shards")
    # Only recorded sequences are sent: a large batch has many times the tokens of a record.
    by_rank = layout.gather_objects("shards", [sequence for k, sequence in enumerate(local) if (rank, k) in chosen])
    sequences = sorted(chain.from_iterable(by_rank), key=lambda sequence: sequence.sequence_id)
    return TokenRecord(step, first_trusted_id, len(lengths), sum(lengths), sequences)


def choose_sequences(lengths: Sequence[int], rng: np.random.Generator, max_tokens: int) -> list[int]:
    """Choose the sequences of a record, as indices in random order: those that fit into `max_tokens`, at least one."""
    order = rng.permutation(len(lengths)).tolist()
    totals = accumulate(lengths[i] for i in order)
    return order[: max(1, sum(total <= max_tokens for total in totals))]


@dataclass(frozen=True)
class MicroBatchResult:
    """The results of one forward, without a graph."""

    batch: Batch
    tokens: Tokens
    weights: GibbsWeights  # methods without utilities use only `weights`
    shares: Tensor  # `[num_sequences]`, share of each sequence in the global batch's weighted loss
    alpha: Tensor | float
    """Alpha of each sequence `[num_sequences]` or of the micro-batch; 1 if it belongs to the global batch."""
    weighted_loss: Tensor  # scalar, this micro-batch's part of the global batch's weighted loss, before alpha
    scaled_loss: Tensor  # the same after such an alpha: the loss that was differentiated
    base_kl: Tensor | None = None
    """Scalar, this micro-batch's part of the global batch's mean `KL(base || model)`, which `method.kl_weight` adds to
    the loss; None for methods without it."""


_MEANS = ("tau", "kl", "effective_sample_size", "total_weight")  # over sequences
_OF_TILT = ("tau", "kl", "num_saturated")  # None for methods other than vcore
_OF_UTILITIES = ("utility_mean", "utility_std")  # None for methods without them
_NOT_WRITTEN = ("scaled_loss", "num_non_finite", "base_kl")  # base_kl is written where it is part of the loss


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step, as written to metrics.jsonl."""

    values: Mapping[str, float | int | None]
    tokens: Sequence[SequenceTokens] | None  # this rank's sequences; None unless the recorder kept them


class StepRecorder:
    """Collects the measurements of a step: seconds by phase, and sums over this rank's micro-batches, which stay on the
    device until `totals` to avoid host-device synchronisations."""

    def __init__(self, device: torch.device, *, keep_tokens: bool = False):
        """`keep_tokens`: also return single tokens, which synchronises with the device."""
        self._device = device
        self._results: list[MicroBatchResult] | None = [] if keep_tokens else None
        self._method: MethodConfig | None = None
        self._counts: GlobalCounts | None = None
        self._sequence_parallel = 1
        self._started = self._now()
        self._seconds = {"probe": 0.0, "utility": 0.0, "main": 0.0, "step": 0.0}
        self._peak_bytes: dict[str, int | None] = dict.fromkeys(self._seconds)
        self._names: list[str] = []  # of the numbers in `_sums`, which ends with the moments
        self._sums: Tensor | None = None
        self._finite: list[tuple[list[int], Tensor]] = []

    def begin(self, method: MethodConfig, counts: GlobalCounts) -> None:
        """Set the method and the counts of all supervised tokens of the global batch, even if the method drops some."""
        self._method, self._counts = method, counts

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """A context that measures a phase: `probe`, `utility`, `main` or `step`. Synchronises with the
        device at both ends, so that each phase is charged for its kernels."""
        mark(name)
        started = self._now()
        peak_memory.start_phase()
        with torch.profiler.record_function(name):
            yield
            ended = self._now()  # within the profiler's range, so that it covers the device's work
        self._peak_bytes[name] = peak_memory.phase_bytes()
        self._seconds[name] += ended - started

    def add(self, result: MicroBatchResult) -> None:
        assert self._method is not None and self._counts is not None  # `begin` comes first
        tokens, gibbs, q = result.tokens, result.weights, result.weights.weights
        index, num_sequences, num_tokens = tokens.sequence_index, tokens.num_sequences, tokens.num_tokens()
        s = torch.zeros_like(tokens.losses) if tokens.utilities is None else tokens.utilities
        sequence_losses = segment_sum(tokens.losses, index, num_sequences)
        sums_of_sequences = [sequence_losses, *(segment_sum(x, index, num_sequences) for x in (s, q))]
        finite = torch.stack(sums_of_sequences).isfinite().all(0)
        self._finite.append((result.batch.sequence_ids, finite))
        self._sequence_parallel = result.batch.sequence_parallel
        shares = sequence_shares(num_tokens, self._counts, self._method.normalization)
        base_kl = torch.zeros_like(result.weighted_loss) if result.base_kl is None else result.base_kl
        sums = {
            # Uniform cross-entropy over all supervised tokens, so that methods are comparable.
            "loss": (shares * sequence_losses / num_tokens.clamp_min(1)).sum(),
            "weighted_loss": result.weighted_loss,
            "scaled_loss": result.scaled_loss,
            "tau": gibbs.temperature.double().sum(),
            "kl": gibbs.kl.double().sum(),
            "effective_sample_size": effective_sample_size(q, index, num_sequences).double().sum(),
            # 1 for weights that are a distribution, the mean probability for dft, the importance ratio for iw_sft.
            "total_weight": q.double().sum(),
            "num_saturated": gibbs.saturated.double().sum(),
            "utilities": s.double().sum(),
            "squared utilities": s.double().square().sum(),
            "num_non_finite": (~finite).double().sum(),
            "tokens": num_tokens.double().sum(),
            "base_kl": base_kl,
        }
        self._names = list(sums)
        stacked = torch.stack([value.double() for value in sums.values()])
        stacked = torch.cat([stacked, utility_moments(s, q, index, num_sequences)])
        self._sums = stacked if self._sums is None else self._sums + stacked
        if self._results is not None:
            self._results.append(result)

    def totals(self) -> tuple[dict[str, float], Tensor]:
        """Sum the added micro-batches over all ranks: totals by their names in metrics.jsonl, losses normalised as the
        recipe says, with `scaled_loss`, after the alphas of sequences or micro-batches, and `num_non_finite`, the
        sequences with a loss, utility or weight of inf or NaN; and `[5]` fp64, see `utility_moments`. A collective."""
        assert self._sums is not None  # a step has at least one micro-batch, idle or not
        sums = layout.sum_over("data", self._sums.tolist(), self._sequence_parallel)
        moments = torch.tensor(sums[len(self._names) :], dtype=torch.float64)
        values = dict(zip(self._names, sums, strict=False))
        num_tokens = max(values.pop("tokens"), 1.0)
        mean, mean_square = (values.pop(name) / num_tokens for name in ("utilities", "squared utilities"))
        values |= {name: values[name] / max(float(moments[0]), 1.0) for name in _MEANS}
        values["num_saturated"] = int(values["num_saturated"])
        values |= {"utility_mean": mean, "utility_std": max(0.0, mean_square - mean**2) ** 0.5}
        return values, moments

    def non_finite_sequence_ids(self) -> list[int]:
        """List this rank's sequences with a loss, utility or weight of inf or NaN."""
        return [i for ids, finite in self._finite for i, ok in zip(ids, finite.tolist(), strict=False) if not ok]

    def metrics(self, totals: Mapping[str, float], alpha: float | None, **numbers: float | None) -> StepMetrics:
        """Make the metrics at the end of the step. `alpha`: of the global batch; None if sequences or micro-batches
        have separate ones. `numbers`: further metrics by name."""
        assert self._method is not None and self._counts is not None
        method, counts = self._method, self._counts
        seconds = self._now() - self._started
        tokens: list[SequenceTokens] = []
        for result in self._results or []:
            uniform_shares = sequence_shares(result.tokens.num_tokens(), counts, method.normalization)
            tokens += split_into_sequences(result, uniform_shares, result.alpha if alpha is None else alpha)
        if alpha is None:  # the alphas' effect on the loss
            alpha = totals["scaled_loss"] / totals["weighted_loss"] if totals["weighted_loss"] else 1.0
        values = {
            **{key: value for key, value in totals.items() if key not in _NOT_WRITTEN},
            **dict.fromkeys(() if method.name == "vcore" else _OF_TILT),
            **dict.fromkeys(() if method.uses_utilities else _OF_UTILITIES),
            "alpha": alpha,
            **dict.fromkeys(("probe_loss", "probe_grad_norm", "direction_energy")),
            **numbers,
            "supervised_tokens": counts.num_supervised_tokens_global,
            "sequences": counts.num_sequences_global,
            "seconds": seconds,
            **{f"seconds_{name}": value for name, value in self._seconds.items()},
            "supervised_tokens_per_second": counts.num_supervised_tokens_global / seconds,
            "peak_memory_bytes": peak_memory.process_bytes(),
            **{f"peak_memory_bytes_{name}": value for name, value in self._peak_bytes.items()},
        }
        return StepMetrics(values, None if self._results is None else tokens)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
