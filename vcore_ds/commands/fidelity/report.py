"""The measurements of `vcore-ds fidelity`, measures of agreement, and the files written; the prose is in `text`."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vcore_ds.commands.fidelity.output import JSON_NAME, PICTURE_NAME
from vcore_ds.files.aside import written_aside
from vcore_ds.files.user_paths import writing
from vcore_ds.method.weights import segment_sum
from vcore_ds.results.presentation import new_figure

RELIABLE_SPEARMAN = 0.9
"""Rank correlation from which on utilities order the tokens well enough to train with."""

ProbeLoss = Literal["uniform", "dft"]


@dataclass(frozen=True)
class Agreement:
    """Agreement of utilities with a reference's, over the tokens of the measured sequences. None: not defined."""

    spearman: float | None
    """Rank correlation over all tokens; None where either is constant or not finite."""
    spearman_within_sequences: float | None
    """Mean over sequences of the rank correlation over a sequence's tokens, which alone decides its weights."""
    relative_error: float | None
    """`|s - reference| / |reference|`, 2-norms over all tokens."""
    weight_overlap: float | None
    """`1 - total variation` of a sequence's token weights and the reference's, mean over sequences: the share of the
    weight that lies on the right tokens."""


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
    """Everything that fidelity.json holds but the recommendations."""

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
    """Weight overlap of uniform weights with the reference's: the value that no utilities at all would reach."""
    loss_error_nats: float | None = None
    """Rms over tokens of the loss in the recipe's precision minus the reference's, at the same parameters."""
    large_probe_size: int = 0
    notes: list[str] = field(default_factory=list)
    """Deviations from the requested measurements, and their reasons."""
    estimators: list[Estimate] = field(default_factory=list)
    probe_sizes: list[ProbeSize] = field(default_factory=list)
    other_probe_loss: ProbeSize | None = None
    """The recipe's |B'| with the `probe.loss` that is not the recipe's."""
    stale_directions: list[StaleDirection] = field(default_factory=list)


# ---- agreement -----------------------------------------------------------------------------------------------------


def rank_correlation(left: Tensor, right: Tensor) -> float | None:
    """Spearman's rank correlation, where ties share their mean rank; None where a side is constant or not finite."""
    if len(left) < 2 or not bool((left.isfinite() & right.isfinite()).all()):
        return None
    ranks = torch.stack([_ranks(left), _ranks(right)])
    if bool((ranks == ranks[:, :1]).all(1).any()):
        return None
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, group, counts = torch.unique(values, return_inverse=True, return_counts=True)  # groups in ascending order
    return (counts.cumsum(0).double() - (counts - 1) / 2)[group]


def agreement(
    utilities: Tensor, reference: Tensor, weights: Tensor, reference_weights: Tensor, sequence_index: Tensor
) -> Agreement:
    """Agreement of utilities and their weights with a reference's.

    Args:
        utilities, reference, weights, reference_weights: `[N]`, on the CPU.
        sequence_index: `[N]`, the measured sequence of each token, from 0.
    """
    num_sequences = int(sequence_index.max()) + 1
    within = [
        rank_correlation(utilities[own], reference[own]) for own in (sequence_index == i for i in range(num_sequences))
    ]
    utilities, reference = utilities.double(), reference.double()
    error = float((utilities - reference).norm() / reference.norm())
    variation = 0.5 * segment_sum((weights - reference_weights).double().abs(), sequence_index, num_sequences)
    overlap = float((1.0 - variation).mean())
    return Agreement(
        spearman=rank_correlation(utilities, reference),
        spearman_within_sequences=mean(within),
        relative_error=error if math.isfinite(error) else None,
        weight_overlap=overlap if math.isfinite(overlap) else None,
    )


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are defined; None where none is."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


# ---- files ---------------------------------------------------------------------------------------------------------


def write_report(report: FidelityReport, sentences: Sequence[str], folder: Path) -> None:
    """`fidelity.json` and `fidelity.png` in `folder`. Raises UserError where they cannot be written."""
    text = json.dumps(as_json(report, sentences), indent=2, allow_nan=False) + "\n"
    with writing("--output", folder):
        with written_aside(folder / JSON_NAME) as unfinished:
            unfinished.write_text(text)
        with written_aside(folder / PICTURE_NAME) as unfinished:
            draw(report, unfinished)


def as_json(report: FidelityReport, sentences: Sequence[str]) -> dict[str, Any]:
    """Contents of fidelity.json; null for values that are not defined."""
    values = asdict(report)
    for estimate in values["estimators"]:
        estimate |= estimate.pop("agreement")
    return _without_nan(values | {"recommendations": list(sentences)})


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(report: FidelityReport, path: Path) -> None:
    """Plots rank correlation against epsilon, probe size and steps kept: a panel for each that was measured."""
    jvp = next(found for found in report.estimators if found.epsilon is None)
    differences = sorted(
        (found for found in report.estimators if found.epsilon is not None), key=lambda e: e.epsilon or 0.0
    )
    panels: list[tuple[str, list[float], list[tuple[str, list[float | None]]]]] = [
        (
            f"epsilon of the finite difference ({report.precision})",
            [found.epsilon for found in differences if found.epsilon is not None],
            [
                ("finite difference", [found.agreement.spearman for found in differences]),
                ("jvp", [jvp.agreement.spearman] * len(differences)),
                ("share of parameters changed", [found.changed_fraction for found in differences]),
            ],
        ),
        (
            f"probe size |B'| (with one of {report.large_probe_size})",
            [found.batch_size for found in report.probe_sizes],
            [
                ("mean of the draws", [found.spearman for found in report.probe_sizes]),
                ("lowest", [found.spearman_min for found in report.probe_sizes]),
            ],
        ),
        (
            "optimizer steps a direction is kept",
            [found.steps for found in report.stale_directions],
            [("with a fresh direction", [found.spearman for found in report.stale_directions])],
        ),
    ]
    panels = [panel for panel in panels if panel[1]]
    figure = new_figure(5.0 * len(panels), 4.0)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axis, (label, positions, lines) in zip(axes[0], panels, strict=True):
        for (name, values), style in zip(lines, ("o-", "s--", "x:"), strict=False):
            drawn = [math.nan if value is None else value for value in values]
            axis.plot(positions, drawn, style, label=name)
        axis.set_xscale("log")
        axis.set_xticks(positions, [f"{position:g}" for position in positions])
        axis.minorticks_off()
        axis.set_xlabel(label)
        axis.axhline(RELIABLE_SPEARMAN, color="gray", linewidth=0.5, label=f"{RELIABLE_SPEARMAN:g}, reliable")
        axis.legend(fontsize="small")
    axes[0][0].set_ylabel("Spearman rank correlation")
    model, lora = report.recipe["model"]["path"], report.recipe["lora"]
    trained = "full-parameter" if lora is None else f"LoRA rank {lora['rank']}"
    figure.suptitle(f"{Path(model).name}, {trained}, {report.precision}, after {report.steps_before} steps")
    figure.set_layout_engine("none")  # it is laid out once, here
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)  # named, as the unfinished file's suffix does not tell
