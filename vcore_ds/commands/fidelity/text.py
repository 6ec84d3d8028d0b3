"""What a fidelity report means: tables, and sentences with the numbers they rest on."""

from collections.abc import Iterator, Sequence

from vcore_ds.commands.fidelity.report import RELIABLE_SPEARMAN, Estimate, FidelityReport
from vcore_ds.results.presentation import aligned

EXACT_SPEARMAN = 0.99
NOISE_SPEARMAN = 0.5
"""Below this, most of an estimate is something else than the utility."""


def describe(report: FidelityReport, sentences: Sequence[str]) -> str:
    """The tables, and the sentences below them."""
    paragraphs = [_heading(report), _estimator_table(report)]
    if report.probe_sizes:
        paragraphs.append(_probe_table(report))
    if report.stale_directions:
        paragraphs.append(_stale_table(report))
    paragraphs.append("What follows:\n" + "\n".join(f"- {sentence}" for sentence in sentences))
    return "\n\n".join(paragraphs)


def _heading(report: FidelityReport) -> str:
    return (
        f"{report.num_sequences} sequences, {report.num_tokens} supervised tokens, after {report.steps_before} steps "
        f"of training; utilities (standard deviation {_number(report.utility_std)}) along the direction of a probe of "
        f"{report.probe_batch_size} ({report.direction}).\n"
        f"Compared with the same parameters computed in {report.reference_precision}; the losses in "
        f"{report.precision} are {_number(report.loss_error_nats)} nats (rms) off."
    )


def _estimator_table(report: FidelityReport) -> str:
    head = ["estimator", "epsilon", "Spearman", "within a", "relative", "weight", "parameters", "signal", "rounding"]
    unit = ["", "", "", "sequence", "error", "overlap", "changed", "to noise", "in nats"]
    rows = [
        [
            ("*" if found.of_recipe else " ") + found.estimator,
            "-" if found.epsilon is None else f"{found.epsilon:g}",
            _correlation(found.agreement.spearman),
            _correlation(found.agreement.spearman_within_sequences),
            _number(found.agreement.relative_error),
            _percent(found.agreement.weight_overlap),
            _percent(found.changed_fraction),
            _number(found.signal_to_noise),
            _number(found.rounding_floor_nats),
        ]
        for found in report.estimators
    ]
    overlap = _percent(report.uniform_weight_overlap)
    footnote = f"* what the recipe trains with. Weight overlap of uniform weights: {overlap}"
    return "\n".join([*aligned([head, unit, *rows]), footnote])


def _probe_table(report: FidelityReport) -> str:
    other = report.other_probe_loss
    rows = [
        [
            f"{'*' if found.of_recipe else ' '}{found.batch_size}{f', {found.loss} loss' if found is other else ''}",
            str(found.num_draws),
            _correlation(found.spearman),
            _correlation(found.spearman_min),
            _percent(found.weight_overlap),
        ]
        for found in (*report.probe_sizes, *([] if other is None else [other]))
    ]
    title = f"Probe size: utilities along a probe of |B'| with those along one of {report.large_probe_size}"
    return "\n".join([title, *aligned([[" |B'|", "draws", "Spearman", "lowest", "weight overlap"], *rows])])


def _stale_table(report: FidelityReport) -> str:
    rows = [
        [f" {found.steps}", _correlation(found.spearman), _percent(found.weight_overlap)]
        for found in report.stale_directions
    ]
    title = f"Stale direction: that of the probe of {report.large_probe_size}, kept, with the same probe's now"
    return "\n".join([title, *aligned([[" steps kept", "Spearman", "weight overlap"], *rows])])


def recommendations(report: FidelityReport) -> list[str]:
    """Plain sentences, each with the numbers it rests on."""
    if report.utility_std == 0.0:
        return ["The utilities of the reference are all the same: the direction is zero, and there is nothing to rank."]
    return [
        *_about_jvp(report),
        *_about_finite_differences(report),
        *_about_probe_sizes(report),
        *_about_staleness(report),
    ]


def _about_jvp(report: FidelityReport) -> Iterator[str]:
    found = next(estimate for estimate in report.estimators if estimate.estimator == "jvp").agreement
    numbers = (
        f"Spearman {_correlation(found.spearman)} with the {report.reference_precision} reference, "
        f"{_percent(found.weight_overlap)} of the weight where it belongs (uniform weights: "
        f"{_percent(report.uniform_weight_overlap)})"
    )
    if found.spearman is not None and found.spearman >= EXACT_SPEARMAN:
        yield f"Use utility.estimator=jvp: {numbers}."
    else:
        yield (
            f"utility.estimator=jvp reaches {numbers}. What is missing is the rounding of a {report.precision} forward "
            f"itself (its losses are {_number(report.loss_error_nats)} nats off), which no estimator in this precision "
            "escapes" + ("; model.precision=fp32 does." if report.precision == "bf16" else ".")
        )


def _about_finite_differences(report: FidelityReport) -> Iterator[str]:
    found = sorted((e for e in report.estimators if e.epsilon is not None), key=lambda e: -(e.epsilon or 0.0))
    if not found:
        return
    best = max(found, key=_spearman_or_zero)
    usable = [e for e in found if _spearman_or_zero(e) >= RELIABLE_SPEARMAN]
    if len(usable) > 1:
        yield (
            f"A finite difference needs an epsilon between {usable[-1].epsilon:g} and {usable[0].epsilon:g} here "
            f"(Spearman at least {RELIABLE_SPEARMAN:g}); {best.epsilon:g} is best with "
            f"{_correlation(best.agreement.spearman)}."
        )
    elif usable:
        yield (
            f"A finite difference is right at one of the epsilons tried only, {best.epsilon:g}, with Spearman "
            f"{_correlation(best.agreement.spearman)}."
        )
    else:
        yield (
            f"A finite difference is right at none of the epsilons tried (Spearman at least {RELIABLE_SPEARMAN:g}); "
            f"{best.epsilon:g} is best with {_correlation(best.agreement.spearman)}"
            + (", and a longer step may be better (--epsilons)." if best is found[0] else ".")
        )
    for estimate in found:
        if _spearman_or_zero(estimate) < NOISE_SPEARMAN:
            assert estimate.epsilon is not None and best.epsilon is not None
            yield _what_is_wrong(estimate, too_long=estimate.epsilon > best.epsilon)
    used = next((e for e in found if e.of_recipe), None)
    if used is not None and _spearman_or_zero(used) < RELIABLE_SPEARMAN:
        yield (
            f"The recipe's own epsilon, {used.epsilon:g}, is not reliable: {_percent(used.agreement.weight_overlap)} "
            "of the weight lies where it belongs, and uniform weights would put "
            f"{_percent(report.uniform_weight_overlap)} there. Set utility.estimator=jvp utility.epsilon=null."
        )


def _what_is_wrong(estimate: Estimate, too_long: bool) -> str:
    spearman = _correlation(estimate.agreement.spearman)
    if too_long:
        return f"epsilon {estimate.epsilon:g} is too long a step for a derivative: Spearman {spearman}."
    if estimate.agreement.spearman is None:
        return (
            f"epsilon {estimate.epsilon:g} gives every token the same utility: {_percent(estimate.changed_fraction)} "
            "of the parameters changed."
        )
    return (
        f"epsilon {estimate.epsilon:g} is rounding: Spearman {spearman}, "
        f"{_percent(estimate.changed_fraction)} of the parameters changed, and the loss change is "
        f"{_number(estimate.signal_to_noise)} times its noise."
    )


def _about_probe_sizes(report: FidelityReport) -> Iterator[str]:
    sizes = report.probe_sizes
    if not sizes:
        return
    large = f"a probe of {report.large_probe_size}"
    enough = next((found for found in sizes if (found.spearman or 0.0) >= RELIABLE_SPEARMAN), None)
    if enough is not None:
        yield f"|B'| {enough.batch_size} is the smallest that agrees with {large} to {_correlation(enough.spearman)}."
    else:
        yield (
            f"No probe size tried agrees with {large} to {RELIABLE_SPEARMAN:g}; |B'| {sizes[-1].batch_size} reaches "
            f"{_correlation(sizes[-1].spearman)}."
        )
    used = next((found for found in sizes if found.of_recipe), None)
    if used is not None:
        yield f"The recipe's |B'| {used.batch_size} agrees with it to {_correlation(used.spearman)}."


def _about_staleness(report: FidelityReport) -> Iterator[str]:
    fresh_enough = None
    for found in report.stale_directions:
        if (found.spearman or 0.0) < RELIABLE_SPEARMAN:
            break
        fresh_enough = found
    if fresh_enough is not None:
        yield (
            f"A direction may be kept for {fresh_enough.steps} steps here (probe.every={fresh_enough.steps}): it still "
            f"agrees with a fresh one to {_correlation(fresh_enough.spearman)}."
        )
    elif report.stale_directions:
        first = report.stale_directions[0]
        yield (
            f"A direction should not be kept (probe.every=1): after {first.steps} steps it agrees with a fresh one to "
            f"{_correlation(first.spearman)} only."
        )


def _spearman_or_zero(estimate: Estimate) -> float:
    return estimate.agreement.spearman or 0.0


def _correlation(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g}%"
