"""Measure the accuracy of a recipe's utilities on its model, data, precision and parallelism.

The reference is the same model at the same parameters along the same direction, in the next higher precision, and still
sharded (`utility.forward_mode(..., precision)`): differences come from precision and estimator only, and nothing has to
fit on one device.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice

import torch
from torch import Tensor

from vcore_ds.commands.fidelity import FidelityOptions
from vcore_ds.commands.fidelity import report as reports
from vcore_ds.commands.fidelity.report import Agreement, Estimate, FidelityReport
from vcore_ds.common.errors import UserError
from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.common.text import count as count_text
from vcore_ds.common.text import duration
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import MethodConfig
from vcore_ds.data.dataset import list_shares, shuffle_by_share
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.watchdog import mark, watching
from vcore_ds.engine.zero3 import Engine
from vcore_ds.method.weights import Tokens
from vcore_ds.models.architecture_check import check_model_folder
from vcore_ds.models.description import can_replace_attention, read_model
from vcore_ds.models.loading import DTYPES
from vcore_ds.models.lora_linear import has_fp8_units
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.known_models import is_on_disk
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training import console
from vcore_ds.training.feed import DataReader, Feed, build_feed
from vcore_ds.training.loop import Trainer
from vcore_ds.training.run_folder import describe_environment
from vcore_ds.training.schedule import Schedule, derive_schedule
from vcore_ds.training.setup import build_engine, build_estimator, plan_ranks, start_ranks
from vcore_ds.training.start_checks import check_start
from vcore_ds.training.start_screen import describe_data, describe_method, describe_model, describe_training
from vcore_ds.training.step import take_direction
from vcore_ds.training.weighting import token_weights
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import (
    choose_epsilon,
    compute_jvp_utilities,
    compute_losses,
    compute_perturbed_losses,
    signal_to_noise,
)
from vcore_ds.utility.forward_mode import compute_losses_and_utilities, forward_mode

DEFAULT_KL_BUDGET = 0.05  # nats; for the weights of a recipe whose method has no utilities
REFERENCE_PRECISION = {"bf16": "fp32", "fp32": "fp64"}

Say = Callable[[str], None]


def measure_fidelity(recipe: Recipe, options: FidelityOptions) -> FidelityReport:
    """Measure, print, and write into `options.output`. Collective. Raises UserError before the model is loaded."""
    path = recipe.model.path
    check_model_folder(path)
    if is_on_disk(path) and not can_replace_attention(read_model(path, local_files_only=True).config):
        raise UserError(
            f"model.path: {path}: found an architecture with custom attention code; expected one whose attention can "
            "be replaced, because the reference is a forward-mode derivative"
        )
    start_ranks(recipe.engine, recipe.parallel)
    with watching(recipe.engine.lost_rank_seconds, recipe.engine.timeout_minutes):
        return _measure(recipe, options)


def _measure(recipe: Recipe, options: FidelityOptions) -> FidelityReport:
    weighted = _with_utilities(recipe)
    plan_settings = derive_plan_settings(weighted)
    plan = plan_ranks(plan_settings)
    ds_config = deepspeed_config(plan_settings, plan)
    ds_config["zero_optimization"]["memory_efficient_linear"] = False  # its linear layers have no JVP
    method, probe, seed = recipe.method, recipe.probe, recipe.run.seed
    reader = DataReader(recipe.data, recipe.model.path, load_tokenizer(recipe.model.path))
    dataset = reader.read_training_data(recipe.method, seed)
    probe_path = recipe.data.probe_path
    trusted = None if probe_path is None else reader.read_store(probe_path)
    feed = build_feed(method, probe, plan, dataset, reader.pad_token_id, seed=seed, probe_dataset=trusted)
    schedule = derive_schedule(
        recipe.schedule, recipe.optimizer.learning_rate, len(dataset), feed.main_order.batch_size
    )
    if options.after_steps > schedule.num_steps:
        raise UserError(
            f"--after-steps {options.after_steps}: found more than the recipe's {schedule.num_steps} steps; expected "
            "at most that many. Lower it, or raise schedule.num_steps"
        )
    probe_size = len(feed.probe_dataset) if plan.probe_batch_size_global is None else plan.probe_batch_size_global
    num_trusted = None if trusted is None else len(trusted)
    measured, probe_ids = choose_sequences(list_shares(dataset), num_trusted, probe_size, options.num_sequences, seed)
    notes = []
    if len(measured) < options.num_sequences:
        notes.append(f"{len(measured)} instead of {options.num_sequences} sequences are measured: there are no more")
    if len(probe_ids) < probe_size:
        notes.append(f"the probe has {len(probe_ids)} instead of {probe_size} sequences: there are no more")
    if not recipe.method.uses_utilities:
        notes.append(f"method {recipe.method.name} has no utilities; measured with method.name=vcore")
    lines = [*(f"Note: {note}" for note in notes), f"Model: {describe_model(recipe.model, recipe.lora, None)}"]
    lines.append(f"Data: {describe_training(recipe.data, dataset)}")
    if trusted is not None and probe_path is not None:
        lines.append(f"Trusted data: {describe_data(probe_path, trusted)}")
    console.say("\n".join([*lines, f"Method: {describe_method(method, recipe.utility, probe, probe_path)}"]))

    engine = build_engine(plan_settings, ds_config)
    check_start(engine, feed)
    mark("measuring utilities")
    started = time.perf_counter()

    def say(text: str) -> None:
        console.say(f"[{duration(time.perf_counter() - started)}] {text}")

    bench = Bench(engine, weighted, feed, measured, say)
    training = train_steps(engine, recipe, feed, schedule, say)
    deque(islice(training, options.after_steps), maxlen=0)
    report = FidelityReport(
        recipe=recipe.model_dump(mode="json"),
        environment=describe_environment(layout.size("job")),
        precision=recipe.model.precision,
        reference_precision=bench.reference_precision,
        steps_before=options.after_steps,
        direction=recipe.probe.direction if engine.num_updates else "sgd",  # no optimizer state yet
        probe_batch_size=len(probe_ids),
        num_sequences=len(measured),
        num_tokens=len(bench.index),
        notes=notes,
    )
    take_direction(bench.direction, weighted.method, probe, feed.probe_batches(probe_ids))
    bench.measure_estimators(report, options.epsilons)
    if recipe.lora is None:
        report.low_ranks = list(bench.measure_low_ranks(options.ranks))
    engine.close()
    console.say("\n" + reports.describe(report))
    if options.output is not None and layout.is_first():
        reports.write_report(report, options.output)
        console.say(f"\nWritten to {options.output}")
    return report


def choose_sequences(
    training: tuple[Sequence[int], Sequence[float]],
    num_trusted: int | None,
    probe_size: int,
    num_measured: int,
    seed: int,
) -> tuple[list[int], list[int]]:
    """Draw the measured sequences from the training data (sizes and weights of its files), and those of the probe from
    the rest of it or from `data.probe_path` (`num_trusted` sequences; None without it). Both may be fewer than asked
    for. Raises UserError unless there is a sequence for each."""
    drawn = generator(Stream.FIDELITY, seed)
    order = shuffle_by_share(*training, drawn).tolist()
    num_measured = min(num_measured, len(order) - (num_trusted is None))
    measured, others = order[: max(num_measured, 0)], order[max(num_measured, 0) :]
    if num_trusted is not None:
        others = drawn.permutation(num_trusted).tolist()
    if not measured or not others:
        key, number, expected = ("train_path", len(order), 2) if num_trusted is None else ("probe_path", num_trusted, 1)
        raise UserError(
            f"data.{key}: found {count_text(number, 'sequence')} within data.cutoff_length; expected at least "
            f"{expected}, to measure on and to take a probe of"
        )
    return measured, others[:probe_size]


def _with_utilities(recipe: Recipe) -> Recipe:
    """Return the recipe, with VCORE in place of a method without utilities."""
    method = recipe.method
    if not method.uses_utilities:
        method = MethodConfig(name="vcore", kl_budget=DEFAULT_KL_BUDGET, normalization=method.normalization)
    return recipe.model_copy(update={"method": method})


class Bench:
    """Passes over the measured sequences. Methods are collective; tensors hold all ranks' tokens, on the CPU."""

    def __init__(self, engine: Engine, recipe: Recipe, feed: Feed, measured: Sequence[int], say: Say):
        """`recipe`: one with utilities (`_with_utilities`)."""
        self.engine, self.recipe, self.say = engine, recipe, say
        self.direction = Direction(engine, rank_passes=recipe.probe.rank_passes)
        self._rounding_seed = recipe.run.seed if recipe.utility.rounding == "stochastic" else None
        self.reference_precision = REFERENCE_PRECISION[recipe.model.precision]
        can_be_fp8 = recipe.model.precision == "bf16" and recipe.model.provider == "huggingface"
        self.takes_fp8_tangents = can_be_fp8 and has_fp8_units()
        self.batches = feed.batches(measured, feed.plan.utility_micro_batch_size_per_rank)
        ids = [torch.tensor(b.sequence_ids, dtype=torch.int64)[b.sequence_index()] for b in self.batches]
        self.index = torch.unique(self.gather(ids), return_inverse=True)[1]
        """`[N]`, each token's sequence, from 0."""

    def measure_estimators(self, report: FidelityReport, epsilons: Sequence[float]) -> None:
        """Compare jvp and finite differences along `self.direction` with the reference."""
        with forward_mode(self.engine, self.direction, DTYPES[self.reference_precision]):
            losses, utilities = zip(*(compute_losses_and_utilities(self.engine, b) for b in self.batches), strict=True)
        reference_losses, reference = self.gather(losses), self.gather(utilities)
        base = self.losses()
        report.utility_std = float(reference.std())
        report.loss_error_nats = float((self.gather([base]) - reference_losses).double().square().mean().sqrt())
        report.uniform_weight_overlap = self.agreement(torch.zeros_like(reference), reference).weight_overlap
        self.say(f"reference in {report.reference_precision}")
        agreement, recipe_utility = self.agreement(self.jvp(), reference), self.recipe.utility
        is_of_recipe = recipe_utility.estimator == "jvp" and recipe_utility.tangent_precision is None
        report.estimators.append(Estimate("jvp", None, agreement, of_recipe=is_of_recipe))
        self.say(f"jvp: Spearman {reports.show(agreement.spearman)}")
        if self.takes_fp8_tangents:
            fp8 = self.direction.with_rank(None, fp8_tangents=True)
            agreement = self.agreement(self.jvp(fp8), reference)
            is_of_recipe = recipe_utility.tangent_precision == "fp8"
            report.estimators.append(Estimate("jvp, FP8 tangents", None, agreement, of_recipe=is_of_recipe))
            self.say(f"jvp with FP8 tangents: Spearman {reports.show(agreement.spearman)}")
        recipe_epsilon = recipe_utility.epsilon
        if recipe_epsilon == "auto":
            recipe_epsilon = choose_epsilon(self.engine, self.direction, self.batches, self._rounding_seed)
            self.say(f"search for epsilon: {recipe_epsilon:.3g}")
        for epsilon in sorted({*epsilons, *({recipe_epsilon} if recipe_epsilon is not None else ())}, reverse=True):
            estimate = self.estimate_finite_difference(epsilon, base, reference)
            report.estimators.append(replace(estimate, of_recipe=epsilon == recipe_epsilon))
            self.say(f"finite difference, epsilon {epsilon:g}: Spearman {reports.show(estimate.agreement.spearman)}")

    def measure_low_ranks(self, ranks: Sequence[int]) -> Iterator[reports.LowRankDirection]:
        """Compare utilities along low-rank approximations of `self.direction` with those along itself."""
        if not ranks:
            return
        full = self.jvp()
        for rank in sorted(ranks):
            low_rank = self.direction.with_rank(rank)
            energy, agreement = low_rank.measure_energy(), self.agreement(self.jvp(low_rank), full)
            self.say(f"direction of rank {rank}: Spearman {reports.show(agreement.spearman)}")
            yield reports.LowRankDirection(rank, energy, agreement)

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """All-gather the parts, always in the same order, from one rank of each sequence-parallel group."""
        is_first = layout.rank("sequence", self.batches[0].sequence_parallel) == 0
        tensors = layout.gather_objects("shards", torch.cat(list(parts)).cpu() if is_first else None)
        return torch.cat([tensor for tensor in tensors if tensor is not None])

    def jvp(self, direction: Direction | None = None) -> Tensor:
        return self.gather(compute_jvp_utilities(self.engine, direction or self.direction, self.batches))

    def losses(self) -> Tensor:
        return torch.cat(compute_losses(self.engine, self.batches, batches_per_pass=1))

    def estimate_finite_difference(self, epsilon: float, base: Tensor, reference: Tensor) -> Estimate:
        """Compare a finite difference with the reference; `base`: this rank's `losses()`."""
        (losses_below, changed_fraction), (losses_above, _) = (
            compute_perturbed_losses(self.engine, self.direction, self.batches, signed, 1, self._rounding_seed)
            for signed in (epsilon, -epsilon)
        )
        below, above = torch.cat(losses_below), torch.cat(losses_above)
        return Estimate(
            "finite_difference",
            epsilon,
            self.agreement(self.gather([(base - below) / epsilon]), reference),
            changed_fraction=changed_fraction,
            signal_to_noise=signal_to_noise(below, base, above),
        )

    def agreement(self, utilities: Tensor, reference: Tensor) -> Agreement:
        """Compare utilities, and the weights that the recipe's method makes of them, with the reference's."""
        num_sequences, losses = int(self.index.max()) + 1, torch.zeros_like(reference)
        if self.recipe.method.base_measure == "dft":  # weights depend on losses then
            losses = self.gather([self.losses()])
        weights, reference_weights = (
            token_weights(self.recipe.method, Tokens(losses.double(), self.index, num_sequences, s.double())).weights
            for s in (utilities, reference)
        )
        return reports.measure_agreement(utilities, reference, weights, reference_weights, self.index)


def train_steps(engine: Engine, recipe: Recipe, feed: Feed, schedule: Schedule, say: Say) -> Iterator[None]:
    """Take the first steps of a run, one per item; the trainer is built at the first."""
    method, probe, passes = recipe.method, recipe.probe, feed.plan.batches_per_utility_pass
    estimator = build_estimator(method, probe, recipe.utility, engine, batches_per_pass=passes)
    trainer = Trainer(engine, estimator, method, probe, schedule, recipe.run.seed)
    for step in count():
        metrics = trainer.step(step, feed.step(step))
        say(f"training step {step + 1}: loss {metrics.values['loss']:.4f}")
        yield
