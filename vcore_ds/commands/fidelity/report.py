"""Results of `vcore-ds fidelity`: measures of agreement, tables, verdict and fidelity.json."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vcore_ds.commands.fidelity import JSON_NAME
from vcore_ds.common.paths import write_text, writing
from vcore_ds.common.statistics import rank_correlation, rank_correlations_within
from vcore_ds.common.text import align_columns
from vcore_ds.method.weights import segment_sum
from vcore_ds.training.start_checks import LEAST_RANK_CORRELATION

RELIABLE_SPEARMAN = 0.9  # the lowest rank correlation with which utilities are good enough to train


@dataclass(frozen=True)
class Agreement:
    """Agreement of utilities with a reference over the measured tokens; None where undefined (constant, not finite)."""

    spearman: float | None
    spearman_within_sequences: float | None
    """Mean over sequences; only the order within a sequence matters for its weights."""
    relative_error: float | None  # `|s - reference| / |reference|`, 2-norms
    weight_overlap: float | None
    """`1 - total variation` between a sequence's token weights and the reference's, mean over sequences."""


@dataclass(frozen=True)
class Estimate:
    """An estimator compared with the reference in higher precision."""

    estimator: str
    epsilon: float | None
    agreement: Agreement
    changed_fraction: float | None = None  # share of the trainable parameters that the perturbation changed
    signal_to_noise: float | None = None
    """Of the loss change before it is divided by epsilon: `utility.estimators.signal_to_noise`."""
    of_recipe: bool = False


@dataclass(frozen=True)
class LowRankDirection:
    """Agreement of utilities along a low-rank approximation of the direction with those along the direction itself."""

    rank: int
    energy: float  # share of `|v|^2` that it keeps
    agreement: Agreement


@dataclass
class FidelityReport:
    """Contents of fidelity.json without the verdict."""

    recipe: dict[str, Any]
    environment: dict[str, Any]
    precision: str
    reference_precision: str
    steps_before: int
    direction: str
    probe_batch_size: int  # sequences whose gradient is the direction that the estimators are compared along
    num_sequences: int
    num_tokens: int
    utility_std: float | None = None  # standard deviation of the reference's utilities over tokens
    uniform_weight_overlap: float | None = None
    """Weight overlap of uniform weights with the reference's: the baseline."""
    loss_error_nats: float | None = None
    """RMS over tokens of the loss in the recipe's precision minus the reference's."""
    notes: list[str] = field(default_factory=list)
    """Deviations from the requested measurements, and their reasons."""
    estimators: list[Estimate] = field(default_factory=list)
    """jvp first, then finite differences from the largest epsilon."""
    low_ranks: list[LowRankDirection] = field(default_factory=list)


def measure_agreement(
    utilities: Tensor, reference: Tensor, weights: Tensor, reference_weights: Tensor, sequence_index: Tensor
) -> Agreement:
    """Measure how well utilities and their weights `[N]` agree with a reference's, on the CPU. `sequence_index` `[N]`:
    each token's sequence, from 0."""
    num_sequences = int(sequence_index.max()) + 1
    utilities, reference = utilities.double(), reference.double()
    arrays = utilities.numpy(), reference.numpy()
    error = float((utilities - reference).norm() / reference.norm())
    variation = 0.5 * segment_sum((weights - reference_weights).double().abs(), sequence_index, num_sequences)
    overlap = float((1.0 - variation).mean())
    return Agreement(
        spearman=rank_correlation(*arrays),
        spearman_within_sequences=mean(rank_correlations_within(*arrays, sequence_index.numpy())),
        relative_error=error if math.isfinite(error) else None,
        weight_overlap=overlap if math.isfinite(overlap) else None,
    )


def mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def write_report(report: FidelityReport, folder: Path) -> None:
    """Write fidelity.json, with null for undefined values. Raises UserError where it cannot be written."""
    values = asdict(report) | {"verdict": list(judge(report))}
    for measured in (*values["estimators"], *values["low_ranks"]):
        measured |= measured.pop("agreement")
    text = json.dumps(_replace_nan(values), indent=2, allow_nan=False) + "\n"
    with writing("--output", folder):
        write_text(folder / JSON_NAME, text)


def _replace_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe(report: FidelityReport) -> str:
    bounds = f"at least {RELIABLE_SPEARMAN:g}, for probe.rank {LEAST_RANK_CORRELATION:g} within sequences"
    verdict = [f"Reliable: Spearman of {bounds}"]
    verdict += [f"  {line}" for line in judge(report)]
    parts = [_estimators(report), _low_ranks(report), verdict]
    return "\n\n".join(filter(None, map("\n".join, parts)))


def _estimators(report: FidelityReport) -> Iterator[str]:
    yield (
        f"{report.num_sequences} sequences, {report.num_tokens} supervised tokens, after {report.steps_before} steps; "
        f"direction {report.direction} of a probe of {report.probe_batch_size}"
    )
    yield (
        f"Against {report.reference_precision}: standard deviation of utilities {show(report.utility_std, '.3g')}, RMS "
        f"error of a {report.precision} loss {show(report.loss_error_nats, '.3g')} nats"
    )
    rows = [
        ["estimator", "epsilon", "Spearman", "within a", "relative", "weight", "parameters", "signal"],
        ["", "", "", "sequence", "error", "overlap", "changed", "to noise"],
    ]
    for one in report.estimators:
        name, agreement = ("*" if one.of_recipe else " ") + one.estimator, one.agreement
        correlations = [show(agreement.spearman), show(agreement.spearman_within_sequences)]
        errors = [show(agreement.relative_error, ".3g"), show(agreement.weight_overlap, ".2%")]
        errors += [show(one.changed_fraction, ".2%"), show(one.signal_to_noise, ".3g")]
        rows.append([name, show(one.epsilon, "g"), *correlations, *errors])
    yield from align_columns(rows)
    yield f"* the recipe's. Weight overlap of uniform weights: {show(report.uniform_weight_overlap, '.2%')}"


def _low_ranks(report: FidelityReport) -> Iterator[str]:
    if report.low_ranks:
        yield "Low-rank direction: utilities along it against those along the full-rank direction"
        rows = [["probe.rank", "of |v|^2", "Spearman", "within a sequence", "weight overlap"]]
        for one in report.low_ranks:
            agreement = one.agreement
            correlations = [show(agreement.spearman, ".4f"), show(agreement.spearman_within_sequences, ".4f")]
            rows.append([f" {one.rank}", f"{one.energy:.1%}", *correlations, show(agreement.weight_overlap, ".2%")])
        yield from align_columns(rows)


def judge(report: FidelityReport) -> Iterator[str]:
    """Yield the reliable values of each setting."""
    jvp = report.estimators[0]
    differences = [one for one in report.estimators if one.epsilon is not None]
    yield f"utility.estimator=jvp: Spearman {show(jvp.agreement.spearman)}"
    if differences:
        best = max(differences, key=lambda one: one.agreement.spearman or 0.0)
        reliable = " ".join(f"{one.epsilon:g}" for one in differences if _is_reliable(one.agreement)) or "none"
        yield f"utility.epsilon: {reliable} of those tried; best {best.epsilon:g}, {show(best.agreement.spearman)}"
    if report.low_ranks:
        within = {low.rank: low.agreement.spearman_within_sequences or 0.0 for low in report.low_ranks}
        ranks = [rank for rank, correlation in within.items() if correlation >= LEAST_RANK_CORRELATION]
        yield f"probe.rank: {f'at least {min(ranks)}' if ranks else 'none of those tried'}"


def _is_reliable(agreement: Agreement) -> bool:
    return (agreement.spearman or 0.0) >= RELIABLE_SPEARMAN


def show(value: float | None, form: str = ".3f") -> str:
    """Format a value; `-` where it is undefined."""
    return "-" if value is None else f"{value:{form}}"
