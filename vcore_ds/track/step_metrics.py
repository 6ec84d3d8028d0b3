"""What one optimizer step measured: sums on a rank, totals over ranks, and the line that is written."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..data import Batch
from ..engine import FiniteDifferenceUtilities, distributed, watchdog
from ..method import (
    GibbsWeights,
    GlobalCounts,
    effective_sample_size,
    segment_sum,
    sequence_shares,
    utility_moments,
)
from ..method.objective import Normalization


class Stopwatch:
    """Wall seconds of the parts of a step. Waits for the GPU at each border, so that a part pays for its own
    kernels."""

    def __init__(self, device: torch.device):
        self._device = device
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {"probe": 0.0, "utility": 0.0, "main": 0.0, "step": 0.0}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        watchdog.mark(name)
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def total(self) -> float:
        return self._now() - self._start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@dataclass(frozen=True)
class TokenWeights:
    """The supervised tokens of one sequence, for people to look at. All tensors `[n_i]`, on the CPU."""

    sequence_id: int
    token_ids: Tensor
    losses: Tensor
    utilities: Tensor | None
    weights: Tensor

    @classmethod
    def of_first_sequence(
        cls, batch: Batch, losses: Tensor, utilities: Tensor | None, weights: Tensor, index: Tensor
    ) -> "TokenWeights":
        own = index == 0
        return cls(
            batch.sequence_ids[0],
            batch.labels[:, 1:][batch.supervised()][own.cpu()],
            losses[own].cpu(),
            None if utilities is None else utilities[own].cpu(),
            weights[own].cpu(),
        )


@dataclass(frozen=True)
class MicroBatchResult:
    """What one forward gave. Tensors `[N]` are over the supervised tokens of the micro-batch; nothing has a graph."""

    losses: Tensor
    """`[N]`, nats."""
    sequence_index: Tensor
    """`[N]`"""
    utilities: Tensor | None
    """`[N]`; None for methods without."""
    weights: Tensor
    """`[N]`, `q[i,t]`: uniform weights are `1 / n_i`."""
    gibbs: GibbsWeights | None
    """Where the weights come from utilities: how."""
    weighted_loss: Tensor
    """Scalar, this micro-batch's part of the global batch's weighted loss, before alpha."""
    scaled_loss: Tensor
    """The same after an alpha that a sequence or a micro-batch has for itself: what was differentiated."""


@dataclass
class StepTotals:
    """Over all ranks and micro-batches of a step. Losses in nats, normalised as the recipe says."""

    loss: float
    """Uniform cross-entropy of the main batch over all supervised tokens, whatever the method, so that methods
    compare."""
    weighted_loss: float
    """Before alpha."""
    scaled_loss: float
    """After the alphas of sequences or micro-batches, before that of the global batch."""
    temperature: float
    """tau, mean over sequences."""
    kl: float
    """KL(q || u) in nats, mean over sequences."""
    effective_sample_size: float
    """Tokens, mean over sequences."""
    total_weight: float
    """`sum_t q[i,t]`, mean over sequences: 1 for weights that are a distribution, the mean probability for dft, the
    importance ratio for iw_sft."""
    num_saturated: int
    """Sequences whose KL budget is out of reach."""
    utility_mean: float
    utility_std: float
    """Over the tokens of the batch."""
    num_non_finite: int
    """Sequences with a loss or utility that is inf or nan."""
    utility_moments: list[float]
    """See `method.utility_moments`."""


@dataclass
class StepSums:
    """Sums over this rank's micro-batches, kept on the device until `over_ranks`: no host sync per micro-batch."""

    totals: StepTotals = field(init=False)
    _sums: Tensor | None = None
    _finite: list[tuple[list[int], Tensor]] = field(default_factory=list)

    def add(self, batch: Batch, result: MicroBatchResult, counts: GlobalCounts, normalization: Normalization) -> None:
        """`counts`: of all supervised tokens, also where the method keeps only some."""
        num_sequences, index = batch.num_sequences, result.sequence_index
        num_tokens = segment_sum(torch.ones_like(result.losses), index, num_sequences)
        s = torch.zeros_like(result.losses) if result.utilities is None else result.utilities
        nothing = result.losses.new_zeros(num_sequences)
        gibbs = result.gibbs or GibbsWeights(result.weights, nothing, nothing, nothing.bool())
        sequence_losses = segment_sum(result.losses, index, num_sequences)
        finite = torch.isfinite(sequence_losses) & torch.isfinite(segment_sum(s, index, num_sequences))
        self._finite.append((batch.sequence_ids, finite))
        shares = sequence_shares(num_tokens, counts, normalization)
        sums = torch.stack(
            [
                (shares * sequence_losses / num_tokens.clamp_min(1)).sum().double(),
                result.weighted_loss.double(),
                result.scaled_loss.double(),
                gibbs.temperature.double().sum(),
                gibbs.kl.double().sum(),
                effective_sample_size(result.weights, index, num_sequences).double().sum(),
                result.weights.double().sum(),
                gibbs.saturated.double().sum(),
                s.double().sum(),
                s.double().square().sum(),
                (~finite).double().sum(),
                num_tokens.double().sum(),
            ]
        )
        sums = torch.cat([sums, utility_moments(s, result.weights, index, num_sequences)])
        self._sums = sums if self._sums is None else self._sums + sums

    def over_ranks(self) -> StepTotals:
        """A collective."""
        assert self._sums is not None  # a step has at least one micro-batch, idle or not
        loss, weighted, scaled, tau, kl, ess, weight, saturated, s, s2, bad, tokens, *moments = (
            distributed.sum_over_ranks(self._sums.tolist())
        )
        sequences, tokens = max(moments[0], 1.0), max(tokens, 1.0)
        variance = max(0.0, s2 / tokens - (s / tokens) ** 2)
        self.totals = StepTotals(
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
            num_non_finite=int(bad),
            utility_moments=moments,
        )
        return self.totals

    def non_finite_sequence_ids(self) -> list[int]:
        return [i for ids, finite in self._finite for i, ok in zip(ids, finite.tolist(), strict=False) if not ok]


@dataclass
class StepMetrics:
    """One step, as it is written to metrics.jsonl, and a sequence's weights beside it."""

    values: dict[str, float | int | None]
    example: TokenWeights | None

    @classmethod
    def of(
        cls,
        totals: StepTotals,
        counts: GlobalCounts,
        watch: Stopwatch,
        *,
        method: str,
        alpha: float,
        probe_loss: float | None,
        probe_grad_norm: float | None,
        direction_norm: float | None,
        grad_norm: float,
        learning_rate: float,
        finite_difference: FiniteDifferenceUtilities | None,
        example: TokenWeights | None,
    ) -> "StepMetrics":
        """`alpha`: of the global batch. `probe_loss`, `probe_grad_norm`: None in a step that did not probe."""
        seconds = watch.total()
        is_vcore = method == "vcore"
        # Where every sequence or micro-batch has its own alpha, the one that is reported is their effect on the loss.
        inner_alpha = totals.scaled_loss / totals.weighted_loss if totals.weighted_loss else 1.0
        values: dict[str, float | int | None] = {
            "loss": totals.loss,
            "weighted_loss": totals.weighted_loss,
            "alpha": alpha * inner_alpha,
            "tau": totals.temperature if is_vcore else None,
            "kl": totals.kl if is_vcore else None,
            "num_saturated": totals.num_saturated if is_vcore else None,
            "effective_sample_size": totals.effective_sample_size,
            "total_weight": totals.total_weight,
            "utility_mean": totals.utility_mean if is_vcore else None,
            "utility_std": totals.utility_std if is_vcore else None,
            "direction_norm": direction_norm,
            "probe_loss": probe_loss,
            "probe_grad_norm": probe_grad_norm,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "supervised_tokens": counts.num_supervised_tokens_global,
            "sequences": counts.num_sequences_global,
            "seconds": seconds,
            **{f"seconds_{name}": value for name, value in watch.seconds.items()},
            "tokens_per_second": counts.num_supervised_tokens_global / seconds,
            "peak_memory_bytes": distributed.peak_memory_bytes(),
        }
        if finite_difference is not None:
            values |= {
                "epsilon": finite_difference.epsilon,
                "changed_fraction": finite_difference.changed_fraction,
                "signal_to_noise": finite_difference.signal_to_noise,
            }
        return cls(values, example)
