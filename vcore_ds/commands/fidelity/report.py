"""The measurements of `vcore-ds fidelity`: measures of agreement, tables, verdict and fidelity.json."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from vcore_ds.commands.fidelity.choice import JSON_NAME
from vcore_ds.commands.statistics import rank_correlation
from vcore_ds.common.paths import writing, written_aside
from vcore_ds.common.text import aligned
from vcore_ds.method.weights import segment_sum

RELIABLE_SPEARMAN = 0.9
"""Rank correlation from which on utilities order the tokens well enough to train with."""

ProbeLoss = Literal["uniform", "dft"]


@dataclass(frozen=True)
class Agreement:
    """Agreement of utilities with a reference's, over the tokens of the measured sequences; None: not defined."""

    spearman: float | None
    """Rank correlation over all tokens; None where either is constant or not finite."""
    spearman_within_sequences: float | None
    """Mean over sequences of the rank correlation over a sequence's tokens, which alone decides its weights."""
    relative_error: float | None
    """`|s - reference| / |reference|`, 2-norms over all tokens."""
    weight_overlap: float | None
    """`1 - total variation` of a sequence's token weights and the reference's, mean over sequences."""


NOTHING = Agreement(None, None, None, None)


@dataclass(frozen=True)
class Estimate:
    """An estimator compared with the reference in higher precision."""

    estimator: str
    epsilon: float | None
    agreement: Agreement
    changed_fraction: float | None = None
    """Share of the trainable parameters that the perturbation changed."""
    signal_to_noise: float | None = None
    """Ratio for the loss change that the finite difference divides by epsilon, see `utility.signal_to_noise`."""
    rounding_floor_nats: float | None = None
    """Rms over tokens of the error of one loss, from `l(theta + eps v) + l(theta - eps v) - 2 l(theta)`: rounding, and
    curvature where epsilon is large."""
    of_recipe: bool = False
    """Whether the recipe trains with this one."""


@dataclass(frozen=True)
class ProbeSize:
    """Utilities along a small probe's direction, compared with those along the large probe's."""

    batch_size: int
    num_draws: int
    spearman: float | None
    """Mean over the draws, which share no sequence."""
    spearman_min: float | None
    weight_overlap: float | None
    of_recipe: bool = False
    loss: ProbeLoss = "uniform"
    """`probe.loss` of the small probe; the large one's is the recipe's."""


@dataclass(frozen=True)
class StaleDirection:
    """Utilities along the large probe's direction of some steps ago, compared with those along its direction now."""

    steps: int
    spearman: float | None
    weight_overlap: float | None


@dataclass
class FidelityReport:
    """Contents of fidelity.json but for the verdict."""

    recipe: dict[str, Any]
    environment: dict[str, Any]
    precision: str
    reference_precision: str
    steps_before: int
    """Optimizer steps trained before anything was measured."""
    direction: str
    probe_batch_size: int
    """Number of sequences whose gradient is the direction that the estimators are compared along."""
    num_sequences: int
    num_tokens: int
    utility_std: float | None = None
    """Standard deviation of the reference's utilities, over all tokens."""
    uniform_weight_overlap: float | None = None
    """Weight overlap of uniform weights with the reference's, which needs no utilities."""
    loss_error_nats: float | None = None
    """Rms over tokens of the loss in the recipe's precision minus the reference's."""
    large_probe_size: int = 0
    notes: list[str] = field(default_factory=list)
    """Deviations from the requested measurements, and their reasons."""
    estimators: list[Estimate] = field(default_factory=list)
    """jvp first, then finite differences from the longest step."""
    probe_sizes: list[ProbeSize] = field(default_factory=list)
    other_probe_loss: ProbeSize | None = None
    """The recipe's |B'| with the `probe.loss` that is not the recipe's."""
    stale_directions: list[StaleDirection] = field(default_factory=list)


def measure_agreement(
    utilities: Tensor, reference: Tensor, weights: Tensor, reference_weights: Tensor, sequence_index: Tensor
) -> Agreement:
    """Agreement of utilities and their weights with a reference's.

    Args:
        utilities, reference, weights, reference_weights: `[N]`, on the CPU.
        sequence_index: `[N]`, the measured sequence of each token, from 0.
    """
    num_sequences = int(sequence_index.max()) + 1
    utilities, reference = utilities.double(), reference.double()

    def correlate(tokens: Tensor | slice) -> float | None:
        return rank_correlation(utilities[tokens].numpy(), reference[tokens].numpy())

    error = float((utilities - reference).norm() / reference.norm())
    variation = 0.5 * segment_sum((weights - reference_weights).double().abs(), sequence_index, num_sequences)
    overlap = float((1.0 - variation).mean())
    return Agreement(
        spearman=correlate(slice(None)),
        spearman_within_sequences=mean([correlate(sequence_index == i) for i in range(num_sequences)]),
        relative_error=error if math.isfinite(error) else None,
        weight_overlap=overlap if math.isfinite(overlap) else None,
    )


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are defined; None where none is."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


# ---- JSON ----------------------------------------------------------------------------------------------------------


def write_report(report: FidelityReport, folder: Path) -> None:
    """Writes `fidelity.json` into `folder`. Raises UserError where it cannot be written."""
    text = json.dumps(as_json(report), indent=2, allow_nan=False) + "\n"
    with writing("--output", folder), written_aside(folder / JSON_NAME) as unfinished:
        unfinished.write_text(text)


def as_json(report: FidelityReport) -> dict[str, Any]:
    """Contents of fidelity.json; null for values that are not defined."""
    values = asdict(report)
    for estimate in values["estimators"]:
        estimate |= estimate.pop("agreement")
    return _without_nan(values | {"verdict": list(judge(report))})


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- tables --------------------------------------------------------------------------------------------------------


def describe(report: FidelityReport) -> str:
    """Returns the tables and the verdict."""
    verdict = [f"Reliable, with a Spearman correlation of at least {RELIABLE_SPEARMAN:g}:"]
    verdict += [f"  {line}" for line in judge(report)]
    parts = [_estimators(report), _probe_sizes(report), _stale_directions(report), verdict]
    return "\n\n".join(filter(None, map("\n".join, parts)))


def _estimators(report: FidelityReport) -> Iterator[str]:
    yield (
        f"{report.num_sequences} sequences, {report.num_tokens} supervised tokens, after {report.steps_before} steps; "
        f"direction {report.direction} of a probe of {report.probe_batch_size}"
    )
    yield (
        f"Against {report.reference_precision}: standard deviation of utilities {show(report.utility_std, '.3g')}, rms "
        f"error of a {report.precision} loss {show(report.loss_error_nats, '.3g')} nats"
    )
    rows = [
        ["estimator", "epsilon", "Spearman", "within a", "relative", "weight", "parameters", "signal", "rounding"],
        ["", "", "", "sequence", "error", "overlap", "changed", "to noise", "in nats"],
    ]
    for found in report.estimators:
        agreement, name = found.agreement, ("*" if found.of_recipe else " ") + found.estimator
        cells = [name, show(found.epsilon, "g")]
        cells += [show(agreement.spearman), show(agreement.spearman_within_sequences)]
        cells += [show(agreement.relative_error, ".3g"), show(agreement.weight_overlap, ".2%")]
        cells += [show(found.changed_fraction, ".2%"), show(found.signal_to_noise, ".3g")]
        rows.append([*cells, show(found.rounding_floor_nats, ".3g")])
    yield from aligned(rows)
    yield f"* of the recipe. Weight overlap of uniform weights: {show(report.uniform_weight_overlap, '.2%')}"


def _probe_sizes(report: FidelityReport) -> Iterator[str]:
    other = report.other_probe_loss
    rows = [[" |B'|", "draws", "Spearman", "lowest", "weight overlap"]]
    for found in (*report.probe_sizes, *([] if other is None else [other])):
        name = f"{'*' if found.of_recipe else ' '}{found.batch_size}{f', {found.loss} loss' if found is other else ''}"
        numbers = [show(found.spearman), show(found.spearman_min), show(found.weight_overlap, ".2%")]
        rows.append([name, str(found.num_draws), *numbers])
    if len(rows) > 1:
        yield f"Probe size: utilities along a probe of |B'| against those along one of {report.large_probe_size}"
        yield from aligned(rows)


def _stale_directions(report: FidelityReport) -> Iterator[str]:
    rows = [
        [f" {found.steps}", show(found.spearman), show(found.weight_overlap, ".2%")]
        for found in report.stale_directions
    ]
    if rows:
        yield f"Stale direction of the probe of {report.large_probe_size} against the same probe's direction now"
        yield from aligned([[" steps kept", "Spearman", "weight overlap"], *rows])


def judge(report: FidelityReport) -> Iterator[str]:
    """The settings that the measurements support."""
    jvp, *differences = report.estimators
    yield f"utility.estimator=jvp: Spearman {show(jvp.agreement.spearman)}"
    if differences:
        best = max(differences, key=lambda found: found.agreement.spearman or 0.0)
        reliable = [f"{found.epsilon:g}" for found in differences if _is_reliable(found.agreement)]
        best_spearman = show(best.agreement.spearman)
        yield f"utility.epsilon: {' '.join(reliable) or 'none'} of those tried; best {best.epsilon:g}, {best_spearman}"
    if report.probe_sizes:
        sizes = [found.batch_size for found in report.probe_sizes if _is_reliable(found)]
        yield f"probe.batch_size: {f'at least {min(sizes)}' if sizes else 'none of those tried'}"
    if report.stale_directions:
        kept = [found.steps for found in takewhile(_is_reliable, report.stale_directions)]
        yield f"probe.every: at most {max(kept, default=1)}"


def _is_reliable(found: Agreement | ProbeSize | StaleDirection) -> bool:
    return (found.spearman or 0.0) >= RELIABLE_SPEARMAN


def show(value: float | None, form: str = ".3f") -> str:
    """`-` where a value is not defined."""
    return "-" if value is None else f"{value:{form}}"
