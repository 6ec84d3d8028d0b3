"""What one optimizer step measured: sums on a rank, totals over ranks, and the line that is written."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..data import Batch
from ..engine import FiniteDifferenceUtilities, distributed
from ..method import GibbsWeights, GlobalCounts, segment_sum
from ..method.objective import effective_sample_size


class Stopwatch:
    """Wall seconds of the parts of a step. Waits for the GPU at each border, so that a part pays for its own
    kernels."""

    def __init__(self, device: torch.device):
        self._device = device
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {"probe": 0.0, "utility": 0.0, "main": 0.0, "step": 0.0}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
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
            batch.labels[0, 1:][batch.supervised()[0]],
            losses[own].cpu(),
            None if utilities is None else utilities[own].cpu(),
            weights[own].cpu(),
        )


@dataclass
class StepTotals:
    """Over all ranks and micro-batches of a step. Losses in nats, normalised as the recipe says."""

    loss: float
    """Uniform cross-entropy of the main batch, whatever the method, so that methods compare."""
    weighted_loss: float
    """Before alpha."""
    temperature: float
    """tau, mean over sequences."""
    kl: float
    """KL(q || u) in nats, mean over sequences."""
    effective_sample_size: float
    """Tokens, mean over sequences."""
    num_saturated: int
    """Sequences whose KL budget is out of reach."""
    utility_mean: float
    utility_std: float
    """Over the tokens of the batch."""
    num_non_finite: int
    """Sequences with a loss or utility that is inf or nan."""


@dataclass
class StepSums:
    """Sums over this rank's micro-batches, kept on the device until `over_ranks`: no host sync per micro-batch."""

    totals: StepTotals = field(init=False)
    _sums: Tensor | None = None
    _finite: list[tuple[list[int], Tensor]] = field(default_factory=list)

    def add(
        self,
        batch: Batch,
        losses: Tensor,
        weighted_loss: Tensor,
        utilities: Tensor | None,
        q: GibbsWeights,
        index: Tensor,
        num_tokens: Tensor,
        shares: Tensor,
    ) -> None:
        rows = batch.num_rows
        s = torch.zeros_like(losses) if utilities is None else utilities
        sequence_losses = segment_sum(losses, index, rows)
        finite = torch.isfinite(sequence_losses) & torch.isfinite(segment_sum(s, index, rows))
        self._finite.append((batch.sequence_ids, finite))
        sums = torch.stack(
            [
                (shares * sequence_losses / num_tokens.clamp_min(1)).sum().double(),
                weighted_loss.double(),
                q.temperature.double().sum(),
                q.kl.double().sum(),
                effective_sample_size(q.weights, index, rows).double().sum(),
                q.saturated.double().sum(),
                s.double().sum(),
                s.double().square().sum(),
                (~finite).double().sum(),
                (num_tokens > 0).double().sum(),
                num_tokens.double().sum(),
            ]
        )
        self._sums = sums if self._sums is None else self._sums + sums

    def over_ranks(self) -> StepTotals:
        """A collective."""
        assert self._sums is not None  # a step has at least one micro-batch, idle or not
        loss, weighted, tau, kl, ess, saturated, s, s2, bad, sequences, tokens = distributed.sum_over_ranks(
            self._sums.tolist()
        )
        sequences, tokens = max(sequences, 1.0), max(tokens, 1.0)
        variance = max(0.0, s2 / tokens - (s / tokens) ** 2)
        self.totals = StepTotals(
            loss=loss,
            weighted_loss=weighted,
            temperature=tau / sequences,
            kl=kl / sequences,
            effective_sample_size=ess / sequences,
            num_saturated=int(saturated),
            utility_mean=s / tokens,
            utility_std=variance**0.5,
            num_non_finite=int(bad),
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
        alpha: float,
        probe_loss: float | None,
        probe_grad_norm: float | None,
        grad_norm: float,
        learning_rate: float,
        finite_difference: FiniteDifferenceUtilities | None,
        example: TokenWeights | None,
    ) -> "StepMetrics":
        seconds = watch.total()
        weighted = probe_loss is not None
        values: dict[str, float | int | None] = {
            "loss": totals.loss,
            "weighted_loss": totals.weighted_loss,
            "alpha": alpha,
            "tau": totals.temperature,
            "kl": totals.kl,
            "num_saturated": totals.num_saturated,
            "effective_sample_size": totals.effective_sample_size,
            "utility_mean": totals.utility_mean if weighted else None,
            "utility_std": totals.utility_std if weighted else None,
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
