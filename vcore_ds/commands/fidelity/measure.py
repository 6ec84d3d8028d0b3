"""How right the utilities of a recipe are, measured on its own model, data, precision and parallelism.

The reference is the same model at the same parameters along the same direction, computed in the next higher precision
while it stays sharded (`utility.forward_mode(..., precision)`), so what is compared is what the recipe's precision and
the estimator do, and nothing has to fit on one device.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vcore_ds.commands.fidelity.bench import Bench, Training
from vcore_ds.commands.fidelity.choice import (
    Choice,
    FidelityOptions,
    choose_sequences,
    count_measurements,
    num_draws,
    within_the_recipe,
)
from vcore_ds.commands.fidelity.report import (
    Estimate,
    FidelityReport,
    ProbeLoss,
    ProbeSize,
    StaleDirection,
    mean,
    write_report,
)
from vcore_ds.commands.fidelity.text import describe, recommendations
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import MethodConfig
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.watchdog import watching
from vcore_ds.errors import UserError
from vcore_ds.files.run_folder import environment
from vcore_ds.models.configuration import can_replace_attention, read_config
from vcore_ds.models.folder_check import check_model_folder
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.model_shape import is_on_disk
from vcore_ds.progress import BAR_SECONDS, duration
from vcore_ds.track.console import Console
from vcore_ds.train.feed import build_feed, read_dataset, read_training_data
from vcore_ds.train.settings import schedule_of
from vcore_ds.train.setup import build_engine, plan_ranks, start_ranks
from vcore_ds.train.start_check import check_start
from vcore_ds.train.start_screen import describe_data, describe_method, describe_model
from vcore_ds.utility.direction import Direction

DEFAULT_KL_BUDGET = 0.05
"""Nats; makes the weights of a recipe whose method has none."""


def measure_fidelity(recipe: Recipe, options: FidelityOptions) -> FidelityReport:
    """Measures, prints, and writes into `options.output`. Every rank of the job calls it.

    Raises UserError, before the model is loaded, for whatever the user can fix.
    """
    check_model_folder(recipe.model.path)
    check_reference(recipe.model.path)
    start_ranks(recipe)
    with watching(recipe.engine.lost_rank_seconds, recipe.engine.timeout_minutes):
        return measure_together(recipe, options)


def measure_together(recipe: Recipe, options: FidelityOptions) -> FidelityReport:
    """The same with the process group up. A collective."""
    weighted = with_utilities(recipe)
    console = Console(enabled=layout.is_first())
    plan = plan_ranks(weighted)
    ds_config = deepspeed_config(weighted, plan)
    ds_config["zero_optimization"]["memory_efficient_linear"] = False  # jvp is measured whatever the recipe uses
    tokenizer = load_tokenizer(recipe.model.path)
    dataset = read_training_data(recipe, tokenizer, console)
    trusted = None
    if recipe.data.probe_path is not None:
        trusted = read_dataset(recipe, recipe.data.probe_path, tokenizer, console)
    feed = build_feed(recipe, plan, dataset, tokenizer, trusted)
    schedule = schedule_of(recipe, len(dataset))
    options, notes = within_the_recipe(options, schedule.num_steps)
    choice = choose_sequences(
        len(dataset),
        None if trusted is None else len(trusted),
        len(feed.probe_dataset) if plan.probe_batch_size_global is None else plan.probe_batch_size_global,
        options,
        recipe.run.seed,
    )
    notes += [*choice.notes, *notes_on_recipe(recipe, options)]
    for note in notes:
        console.say(f"Note: {note}")

    console.say(f"Model: {describe_model(recipe, None)}")
    console.say(f"Data: {describe_data(recipe.data.train_path, dataset)}")
    if trusted is not None and recipe.data.probe_path is not None:
        console.say(f"Trusted data: {describe_data(recipe.data.probe_path, trusted)}")
    console.say(f"Method: {describe_method(recipe)}")
    engine = build_engine(recipe, ds_config)
    check_start(engine, feed, console)
    bench = Bench(engine, weighted, feed, choice.measured)
    training = Training(engine, recipe, feed, schedule)
    progress = Measurements(console, count_measurements(weighted, options, choice))
    training.train_until(options.after_steps, progress.done)
    report = FidelityReport(
        recipe=recipe.model_dump(mode="json"),
        environment=environment(layout.size("job")),
        precision=recipe.model.precision,
        reference_precision=bench.reference_precision,
        steps_before=options.after_steps,
        direction=recipe.probe.direction if bench.engine.num_updates else "sgd",  # no optimizer state yet
        probe_batch_size=choice.recipe_probe_size,
        num_sequences=len(choice.measured),
        num_tokens=len(bench.index),
        large_probe_size=len(choice.large_probe),
        notes=notes,
    )
    bench.take_direction(choice.small_probes[: report.probe_batch_size])
    measure_estimators(bench, report, options.epsilons, progress)
    if choice.large_probe:
        bench.take_direction(choice.large_probe)
        along_large = bench.jvp()
        progress.done(f"large probe of {len(choice.large_probe)}")
        measure_probe_sizes(bench, report, choice, along_large, progress)
        measure_staleness(bench, report, choice, training, options.stale_steps, progress)
    bench.engine.close()

    sentences = recommendations(report)
    console.say("\n" + describe(report, sentences))
    if options.output is not None and layout.is_first():
        write_report(report, sentences, options.output)
        console.say(f"\nWritten to {options.output}")
    return report


def notes_on_recipe(recipe: Recipe, options: FidelityOptions) -> list[str]:
    """What is measured in another way than the recipe trains."""
    notes = []
    if not recipe.method.uses_utilities:
        notes.append(
            f"method {recipe.method.name} has no utilities: weights are those of vcore with kl_budget "
            f"{DEFAULT_KL_BUDGET:g}, and the recipe's probe section gives the direction"
        )
    if recipe.probe.direction == "adam" and options.after_steps == 0 and options.stale_steps:
        notes.append(
            "without optimizer state the first direction is sgd, and kept directions are compared with adam ones; "
            "--after-steps 1 or more compares like with like"
        )
    return notes


def check_reference(path: str) -> None:
    """Raises UserError where the reference cannot be computed on the model, whatever the recipe's own estimator. A
    model that is not on this machine passes: loading says so."""
    if is_on_disk(path) and not can_replace_attention(read_config(path, local_files_only=True)):
        raise UserError(
            f"model.path: {path}: found an architecture whose attention is its own code; expected one whose attention "
            "can be replaced: the reference is a forward-mode derivative, so nothing can be measured without it"
        )


def with_utilities(recipe: Recipe) -> Recipe:
    """What is measured: the recipe, for a method without utilities with those that its probe section gives."""
    method = recipe.method
    if not method.uses_utilities:
        method = MethodConfig(name="vcore", kl_budget=DEFAULT_KL_BUDGET, normalization=method.normalization)
    return recipe.model_copy(update={"method": method})


class Measurements:
    """One line for each measurement, with the time that is left where that is long."""

    def __init__(self, console: Console, total: int):
        self._console, self._total, self._count = console, total, 0
        self._started = self._last = time.perf_counter()

    def done(self, text: str) -> None:
        now = time.perf_counter()
        self._count += 1
        number = f"{self._count:{len(str(self._total))}d}"
        left = (now - self._started) / self._count * (self._total - self._count)
        rest = f", {duration(left)} left" if left > BAR_SECONDS else ""
        self._console.say(f"[{number}/{self._total}] {text}  ({now - self._last:.1f} s{rest})")
        self._last = now


def measure_estimators(bench: Bench, report: FidelityReport, epsilons: Sequence[float], progress: Measurements) -> None:
    """jvp and finite differences along `bench.direction`, with the reference."""
    reference_losses, reference = bench.reference()
    base = bench.losses()
    report.utility_std = float(reference.std())
    report.loss_error_nats = float((bench.over_ranks([base]) - reference_losses).double().square().mean().sqrt())
    report.uniform_weight_overlap = bench.agreement(torch.zeros_like(reference), reference).weight_overlap
    progress.done(f"reference in {report.reference_precision}")
    found = bench.agreement(bench.jvp(), reference)
    report.estimators.append(Estimate("jvp", None, found, of_recipe=bench.recipe.utility.estimator == "jvp"))
    progress.done(f"jvp: {describe_spearman(found.spearman)}")
    own_epsilon = bench.own_epsilon()
    if bench.recipe.utility.epsilon == "auto":
        progress.done(f"search for epsilon: {own_epsilon:.3g}")
    for epsilon in sorted({*epsilons, *({own_epsilon} if own_epsilon is not None else ())}, reverse=True):
        utilities, estimate = bench.finite_difference(epsilon, base)
        found = bench.agreement(utilities, reference)
        report.estimators.append(replace(estimate, agreement=found, of_recipe=epsilon == own_epsilon))
        progress.done(f"finite difference, epsilon {epsilon:g}: {describe_spearman(found.spearman)}")


def measure_probe_sizes(
    bench: Bench, report: FidelityReport, choice: Choice, along_large: Tensor, progress: Measurements
) -> None:
    """Utilities along small probes with those along the large one; of the recipe's size also with the other loss."""
    recipe_loss: ProbeLoss = bench.recipe.probe.loss
    other_loss: ProbeLoss = "uniform" if recipe_loss == "dft" else "dft"

    def measure(size: int, loss: ProbeLoss) -> ProbeSize:
        draws = []
        for draw in range(num_draws(choice, size)):
            bench.take_direction(choice.small_probes[draw * size : (draw + 1) * size], loss)
            draws.append(bench.agreement(bench.jvp(), along_large))
            label = f"probe of {size}, draw {draw + 1}" + (f", loss {loss}" if loss != recipe_loss else "")
            progress.done(f"{label}: {describe_spearman(draws[-1].spearman)}")
        spearmans = [draw.spearman for draw in draws]
        known = [spearman for spearman in spearmans if spearman is not None]
        return ProbeSize(
            size,
            len(draws),
            mean(spearmans),
            min(known) if len(known) == len(draws) else None,
            mean([draw.weight_overlap for draw in draws]),
            of_recipe=size == report.probe_batch_size and loss == recipe_loss,
            loss=loss,
        )

    report.probe_sizes = [measure(size, recipe_loss) for size in choice.probe_sizes]
    report.other_probe_loss = measure(report.probe_batch_size, other_loss)


def measure_staleness(
    bench: Bench,
    report: FidelityReport,
    choice: Choice,
    training: Training,
    stale_steps: Sequence[int],
    progress: Measurements,
) -> None:
    """Trains on, and compares utilities along the large probe's direction from before with its direction now."""
    if not stale_steps:
        return
    start = training.num_done
    bench.take_direction(choice.large_probe)
    kept = Direction(bench.engine)
    for buffer, current in zip(kept.buffers, bench.direction.buffers, strict=True):
        buffer.copy_(current)
    for steps in sorted(stale_steps):
        training.train_until(start + steps, progress.done)
        stale = bench.jvp(kept)
        bench.take_direction(choice.large_probe)
        found = bench.agreement(stale, bench.jvp())
        report.stale_directions.append(StaleDirection(steps, found.spearman, found.weight_overlap))
        progress.done(f"direction of {steps} steps ago: {describe_spearman(found.spearman)}")


def describe_spearman(value: float | None) -> str:
    return "no ranking (constant)" if value is None else f"Spearman {value:.3f}"
