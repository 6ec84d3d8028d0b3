"""Measurements of one optimizer step: sums on a rank, totals over ranks, and the line that is written."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.config.sections import MethodConfig
from vcore_ds.data.batches import Batch
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import peak_memory
from vcore_ds.distributed.watchdog import mark
from vcore_ds.method.objective import GlobalCounts, effective_sample_size, sequence_shares, utility_moments
from vcore_ds.method.weights import GibbsWeights, Tokens, segment_sum
from vcore_ds.train.console import Console
from vcore_ds.train.profile import mark_phase
from vcore_ds.train.token_records import (
    MOST_PROMPT_TOKENS,
    MOST_TOKENS,
    SequenceTokens,
    TokenRecord,
    TraceTokens,
    write_record,
)

# Records of single tokens.


def sequences_of(
    batch: Batch, tokens: Tokens, weights: Tensor, *, shares: Tensor, uniform_shares: Tensor, alpha: Tensor | float
) -> Iterator[SequenceTokens]:
    """Yield the sequences of a micro-batch that have supervised tokens. Waits for the device. `weights`: `q` `[N]`;
    `shares`, `uniform_shares`: `[num_sequences]`, see `SequenceTokens`; `alpha`: a scalar or `[num_sequences]`."""
    supervised = batch.supervised()
    positions = batch.position_ids()[:, 1:][supervised].to(torch.int32)
    token_ids = batch.labels[:, 1:][supervised].to(torch.int32)
    index = tokens.sequence_index.cpu()
    losses, own_weights = tokens.losses.float().cpu(), weights.float().cpu()
    utilities = None if tokens.utilities is None else tokens.utilities.float().cpu()
    alphas = torch.as_tensor(alpha).double().cpu().expand(tokens.num_sequences).tolist()
    shared = zip(batch.sequence_ids, shares.double().tolist(), uniform_shares.double().tolist(), alphas, strict=False)
    prompts = batch.prompts()
    for number, columns in enumerate(shared):  # an idle batch has one sequence, and no id
        own = index == number
        if own.any():
            yield SequenceTokens(
                *columns,
                positions=positions[own].numpy(),
                token_ids=token_ids[own].numpy(),
                losses=losses[own].numpy(),
                utilities=None if utilities is None else utilities[own].numpy(),
                weights=own_weights[own].numpy(),
                prompt_ids=prompts[number][-MOST_PROMPT_TOKENS:].int().numpy(),
            )


def record_tokens(
    folder: Path,
    step: int,
    own: Sequence[SequenceTokens],
    console: Console,
    *,
    sequence_parallel: int,
    first_trusted_id: int | None,
    seed: int,
) -> None:
    """Write the record of an optimizer step into the run's folder, on rank 0. A collective.

    A record that cannot be written is a warning: rank 0 must not exit while the others train.

    Args:
        own: this rank's sequences of the main batch.
        sequence_parallel: ranks of a group, which hold the same sequences.
        first_trusted_id: see `TokenRecord`.
        seed: of the run.
    """
    mark("token record")
    record = gather_record(step, own, sequence_parallel, first_trusted_id, seed)
    if not layout.is_first() or not record.sequences:
        return
    try:
        write_record(folder, record)
    except OSError as error:
        console.warn(f"the tokens of step {step} cannot be written to {folder} ({error.strerror}): it has no record")


def gather_record(
    step: int, own: Sequence[SequenceTokens], sequence_parallel: int, first_trusted_id: int | None, seed: int
) -> TokenRecord:
    """The record on every rank, the same at any world size. A collective; see `record_tokens` and `choose`."""
    # Ranks of a sequence-parallel group hold the same sequences; one of them contributes.
    own = own if layout.rank("sequence", sequence_parallel) == 0 else []
    sizes = layout.gather_objects("shards", [(sequence.sequence_id, len(sequence)) for sequence in own])
    known = sorted((i, n, rank, k) for rank, part in enumerate(sizes) for k, (i, n) in enumerate(part))
    lengths = [n for _, n, _, _ in known]
    chosen = {known[place][2:] for place in choose(lengths, generator(Stream.TOKEN_RECORDS, seed, step), MOST_TOKENS)}
    here = layout.rank("shards")
    # Only recorded sequences are sent: a large batch has many times the tokens of a record.
    parts = layout.gather_objects("shards", [sequence for k, sequence in enumerate(own) if (here, k) in chosen])
    sequences = sorted((sequence for part in parts for sequence in part), key=lambda sequence: sequence.sequence_id)
    return TokenRecord(step, first_trusted_id, len(lengths), sum(lengths), sequences)


def choose(lengths: Sequence[int], drawn: np.random.Generator, most_tokens: int) -> list[int]:
    """Indices of the sequences of a record, in random order: those that fit into `most_tokens`, and at least one."""
    places: list[int] = []
    total = 0
    for place in drawn.permutation(len(lengths)).tolist():
        total += lengths[place]
        if places and total > most_tokens:
            break
        places.append(place)
    return places


@dataclass(frozen=True)
class MicroBatchResult:
    """The results of one forward, without a graph."""

    batch: Batch
    tokens: Tokens
    weights: GibbsWeights  # for methods without utilities only the weights count
    shares: Tensor  # `[num_sequences]`, of each sequence in the global batch's weighted loss
    alpha: Tensor | float
    """Alpha of each sequence `[num_sequences]` or of the micro-batch; 1 where it belongs to the global batch."""
    weighted_loss: Tensor  # scalar, this micro-batch's part of the global batch's weighted loss, before alpha
    scaled_loss: Tensor  # the same after such an alpha: the loss that was differentiated
    base_kl: Tensor | None = None
    """Scalar, this micro-batch's part of the global batch's mean `KL(base || model)`, which `method.kl_weight` adds to
    the loss; None for methods without it."""


@dataclass(frozen=True)
class StepTotals:
    """Over all ranks and micro-batches of a step. Losses in nats, normalised as the recipe says."""

    loss: float
    """Uniform cross-entropy of the main batch over all supervised tokens, whatever the method, so that methods
    compare."""
    weighted_loss: float  # before alpha
    scaled_loss: float  # after the alphas of sequences or micro-batches, before that of the global batch
    temperature: float  # tau, mean over sequences
    kl: float  # KL(q || u) in nats, mean over sequences
    effective_sample_size: float  # tokens, mean over sequences
    total_weight: float
    """`sum_t q[i,t]`, mean over sequences: 1 for weights that are a distribution, the mean probability for dft, the
    importance ratio for iw_sft."""
    num_saturated: int  # sequences whose KL budget is out of reach
    utility_mean: float
    utility_std: float  # over the tokens of the batch
    base_kl: float  # nats; 0 for methods without it
    num_non_finite: int  # sequences with a loss or utility that is Inf or NaN
    utility_moments: Tensor  # `[5]` fp64, see `method.utility_moments`


@dataclass(frozen=True)
class StepMetrics:
    """One step, as it is written to metrics.jsonl."""

    values: Mapping[str, float | int | None]
    tokens: Sequence[SequenceTokens] | None  # this rank's sequences; None unless the recorder kept them
    followed: Mapping[int, TraceTokens] = field(default_factory=dict)
    """This rank's followed traces, by their indices; empty in most steps."""


class StepRecorder:
    """Collects what a step measures: seconds by part, and sums over this rank's micro-batches. Sums stay on the device
    until `totals`: no host synchronisation per micro-batch. `followed`: as in `StepMetrics`."""

    def __init__(self, device: torch.device, *, keep_tokens: bool = False):
        """`keep_tokens`: return the single tokens too, which waits for the device."""
        self._device = device
        self._results: list[MicroBatchResult] | None = [] if keep_tokens else None
        self.followed: dict[int, TraceTokens] = {}
        self._method: MethodConfig | None = None
        self._counts: GlobalCounts | None = None
        self._sequence_parallel = 1
        self._started = self._now()
        self._seconds = {"probe": 0.0, "utility": 0.0, "main": 0.0, "step": 0.0}
        self._peak_bytes: dict[str, int | None] = dict.fromkeys(self._seconds)
        self._sums: Tensor | None = None
        self._finite: list[tuple[list[int], Tensor]] = []

    def begin(self, method: MethodConfig, counts: GlobalCounts) -> None:
        """`counts`: of all supervised tokens of the global batch, also where the method keeps only some."""
        self._method, self._counts = method, counts

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the step, `probe`, `utility`, `main` or `step`, or `followed` beside it. Waits for the GPU at both
        ends, so that a part pays for its own kernels."""
        mark(name)
        started = self._now()
        peak_memory.start_phase()
        with mark_phase(name):
            yield
            ended = self._now()  # in the range, which so has the device's work
        self._peak_bytes[name] = peak_memory.phase_bytes()
        self._seconds[name] = self._seconds.get(name, 0.0) + ended - started

    def add(self, result: MicroBatchResult) -> None:
        assert self._method is not None and self._counts is not None  # `begin` comes first
        tokens, gibbs, q = result.tokens, result.weights, result.weights.weights
        index, num_sequences, num_tokens = tokens.sequence_index, tokens.num_sequences, tokens.num_tokens()
        s = torch.zeros_like(tokens.losses) if tokens.utilities is None else tokens.utilities
        sequence_losses = segment_sum(tokens.losses, index, num_sequences)
        finite = torch.isfinite(sequence_losses) & torch.isfinite(segment_sum(s, index, num_sequences))
        self._finite.append((result.batch.sequence_ids, finite))
        self._sequence_parallel = result.batch.sequence_parallel
        shares = sequence_shares(num_tokens, self._counts, self._method.normalization)
        sums = torch.stack(
            [
                (shares * sequence_losses / num_tokens.clamp_min(1)).sum().double(),
                result.weighted_loss.double(),
                result.scaled_loss.double(),
                gibbs.temperature.double().sum(),
                gibbs.kl.double().sum(),
                effective_sample_size(q, index, num_sequences).double().sum(),
                q.double().sum(),
                gibbs.saturated.double().sum(),
                s.double().sum(),
                s.double().square().sum(),
                (~finite).double().sum(),
                num_tokens.double().sum(),
                torch.zeros_like(result.weighted_loss.double()) if result.base_kl is None else result.base_kl.double(),
            ]
        )
        sums = torch.cat([sums, utility_moments(s, q, index, num_sequences)])
        self._sums = sums if self._sums is None else self._sums + sums
        if self._results is not None:
            self._results.append(result)

    def totals(self) -> StepTotals:
        """Totals of the micro-batches that were added, over all ranks. A collective."""
        assert self._sums is not None  # a step has at least one micro-batch, idle or not
        loss, weighted, scaled, tau, kl, ess, weight, saturated, s, s2, bad, tokens, base, *moments = layout.sum_over(
            "data", self._sums.tolist(), self._sequence_parallel
        )
        sequences, tokens = max(moments[0], 1.0), max(tokens, 1.0)
        variance = max(0.0, s2 / tokens - (s / tokens) ** 2)
        return StepTotals(
            loss=loss,
            weighted_loss=weighted,
            scaled_loss=scaled,
            temperature=tau / sequences,
            kl=kl / sequences,
            effective_sample_size=ess / sequences,
            total_weight=weight / sequences,
            num_saturated=int(saturated),
            utility_mean=s / tokens,
            utility_std=variance**0.5,
            base_kl=base,
            num_non_finite=int(bad),
            utility_moments=torch.tensor(moments, dtype=torch.float64),
        )

    def non_finite_sequence_ids(self) -> list[int]:
        """This rank's sequences with a loss or utility that is Inf or NaN."""
        return [i for ids, finite in self._finite for i, ok in zip(ids, finite.tolist(), strict=False) if not ok]

    def metrics(self, totals: StepTotals, alpha: float | None, **numbers: float | None) -> StepMetrics:
        """The step's line, at its end. `alpha`: of the global batch; None where sequences or micro-batches have their
        own. `numbers`: what else the step knows, by its name in the metrics."""
        assert self._method is not None and self._counts is not None
        is_vcore, counts = self._method.uses_utilities, self._counts
        seconds = self._now() - self._started
        tokens = None
        if self._results is not None:
            tokens = [sequence for result in self._results for sequence in self._sequences_of(result, alpha)]
        if alpha is None:  # their effect on the loss
            alpha = totals.scaled_loss / totals.weighted_loss if totals.weighted_loss else 1.0
        values = {
            "loss": totals.loss,
            "weighted_loss": totals.weighted_loss,
            "alpha": alpha,
            "tau": totals.temperature if is_vcore else None,
            "kl": totals.kl if is_vcore else None,
            "num_saturated": totals.num_saturated if is_vcore else None,
            "effective_sample_size": totals.effective_sample_size,
            "total_weight": totals.total_weight,
            "utility_mean": totals.utility_mean if is_vcore else None,
            "utility_std": totals.utility_std if is_vcore else None,
            "probe_loss": None,
            "probe_grad_norm": None,
            "direction_energy": None,
            **numbers,
            "supervised_tokens": counts.num_supervised_tokens_global,
            "sequences": counts.num_sequences_global,
            "seconds": seconds,
            **{f"seconds_{name}": value for name, value in self._seconds.items()},
            "supervised_tokens_per_second": counts.num_supervised_tokens_global
            / (seconds - self._seconds.get("followed", 0.0)),
            "peak_memory_bytes": peak_memory.process_bytes(),
            **{f"peak_memory_bytes_{name}": value for name, value in self._peak_bytes.items()},
        }
        return StepMetrics(values, tokens, self.followed)

    def _sequences_of(self, result: MicroBatchResult, alpha: float | None) -> Iterator[SequenceTokens]:
        assert self._method is not None and self._counts is not None
        return sequences_of(
            result.batch,
            result.tokens,
            result.weights.weights,
            shares=result.shares,
            uniform_shares=sequence_shares(result.tokens.num_tokens(), self._counts, self._method.normalization),
            alpha=result.alpha if alpha is None else alpha,
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
