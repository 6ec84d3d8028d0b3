"""Measure the accuracy of a recipe's utilities on its model, data, precision and parallelism.

The reference is the same model at the same parameters along the same direction, in the next higher precision, and still
sharded (`utility.forward_mode(..., precision)`): differences come from precision and estimator only, and nothing has to
fit on one device.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from vcore_ds.commands.fidelity import JSON_NAME
from vcore_ds.commands.page import Table
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import write_text, writing
from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.common.statistics import rank_correlation, rank_correlations_within
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import UtilityConfig
from vcore_ds.data.dataset import list_shares, shuffle_by_share
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.position import mark
from vcore_ds.distributed.watchdog import watching
from vcore_ds.engine.zero3 import Engine
from vcore_ds.method.weights import Tokens, segment_sum
from vcore_ds.models.architecture_check import check_architecture
from vcore_ds.models.description import DTYPES
from vcore_ds.models.dual_tensors import has_fp8_units
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training import console
from vcore_ds.training.feed import DataReader, Feed, build_feed
from vcore_ds.training.loop import Trainer
from vcore_ds.training.run_folder import describe_environment
from vcore_ds.training.schedule import Schedule, derive_schedule
from vcore_ds.training.setup import build_engine, build_estimator, plan_ranks, start_ranks
from vcore_ds.training.start_checks import LEAST_RANK_CORRELATION, check_start
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

REFERENCE_PRECISION = {"bf16": "fp32", "fp32": "fp64"}
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

    def cells(self) -> list[str]:
        """The cells of a table below `AGREEMENT`."""
        correlations = [show(self.spearman, ".4f"), show(self.spearman_within_sequences, ".4f")]
        return [*correlations, show(self.relative_error, ".3g"), show(self.weight_overlap, ".2%")]


AGREEMENT = ["Spearman", "within a sequence", "relative error", "weight overlap"]


@dataclass(frozen=True, kw_only=True)
class EstimatorAgreement(Agreement):
    """An estimator compared with the reference in higher precision."""

    estimator: str
    epsilon: float | None = None
    changed_fraction: float | None = None  # share of the trainable parameters that the perturbation changed
    signal_to_noise: float | None = None
    """Of the loss change before it is divided by epsilon: `utility.estimators.signal_to_noise`."""
    is_selected: bool = False  # by the recipe


@dataclass(frozen=True, kw_only=True)
class LowRankDirection(Agreement):
    """Agreement of utilities along a low-rank approximation of the direction with those along the direction itself."""

    rank: int
    energy: float  # share of `|v|^2` that it keeps


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
    estimators: list[EstimatorAgreement] = field(default_factory=list)
    """jvp first, then finite differences from the largest epsilon."""
    low_ranks: list[LowRankDirection] = field(default_factory=list)


def measure_fidelity(
    recipe: Recipe,
    *,
    num_sequences: int,
    epsilons: Sequence[float],
    ranks: Sequence[int] = (),
    after_steps: int = 0,
    output: Path | None = None,
) -> FidelityReport:
    """Measure on `num_sequences` over all ranks, after optimizer steps, print, and write into `output`. `ranks`: values
    of probe.rank; not measured with LoRA. Collective. Raises UserError before the model is loaded."""
    # The reference is a forward-mode derivative, whatever the recipe's estimator.
    check_architecture(derive_plan_settings(_with_utilities(recipe).model_copy(update={"utility": UtilityConfig()})))
    start_ranks(recipe.engine, recipe.parallel)
    with watching(recipe.engine.lost_rank_seconds, recipe.engine.timeout_minutes):
        report = _measure(recipe, num_sequences, epsilons, ranks, after_steps)
    if output is not None and layout.is_first():
        values = asdict(report) | {"verdict": judge(report)}
        text = TypeAdapter(dict[str, Any]).dump_json(values, indent=2).decode()  # NaN is null
        with writing("--output", output):
            write_text(output / JSON_NAME, f"{text}\n")
        print(f"\nWritten to {output}", flush=True)
    return report


def _measure(
    recipe: Recipe, num_sequences: int, epsilons: Sequence[float], ranks: Sequence[int], after_steps: int
) -> FidelityReport:
    weighted = _with_utilities(recipe)
    plan_settings = derive_plan_settings(weighted)
    plan = plan_ranks(plan_settings)
    ds_config = deepspeed_config(plan_settings, plan)
    ds_config["zero_optimization"]["memory_efficient_linear"] = False  # its linear layers have no JVP
    method, probe, seed = recipe.method, recipe.probe, recipe.run.seed
    adapter = recipe.lora.adapter if recipe.lora else None
    reader = DataReader(recipe.data, recipe.model.path, load_tokenizer(recipe.model.path), adapter)
    dataset = reader.read_training_data(method, seed)
    probe_path = recipe.data.probe_path
    trusted = None if probe_path is None else reader.read_store(probe_path)
    feed = build_feed(method, probe, plan, dataset, reader.pad_token_id, seed=seed, probe_dataset=trusted)
    batch_size = feed.main_order.batch_size
    schedule = derive_schedule(recipe.schedule, recipe.optimizer.learning_rate, len(dataset), batch_size)
    if after_steps > schedule.num_steps:
        raise UserError(
            f"--after-steps {after_steps}: found more than the recipe's {schedule.num_steps} steps; expected "
            "at most that many. Lower it, or raise schedule.num_steps"
        )
    probe_size = plan.probe_batch_size_global or len(feed.probe_dataset)
    num_trusted = None if trusted is None else len(trusted)
    measured, probe_ids = choose_sequences(list_shares(dataset), num_trusted, probe_size, num_sequences, seed)
    if method.name != "vcore":
        console.say(f"Note: measured with method.name=vcore in place of {method.name}")
    engine = build_engine(plan_settings, ds_config)
    check_start(engine, feed)
    mark("measuring utilities")
    bench = Bench(engine, weighted, feed, measured)
    training = train_steps(engine, recipe, feed, schedule)
    deque(islice(training, after_steps), maxlen=0)
    report = FidelityReport(
        recipe=recipe.model_dump(mode="json"),
        environment=describe_environment(layout.size("job")),
        precision=recipe.model.precision,
        reference_precision=REFERENCE_PRECISION[recipe.model.precision],
        steps_before=after_steps,
        direction=probe.direction if engine.num_updates else "sgd",  # no optimizer state yet
        probe_batch_size=len(probe_ids),
        num_sequences=len(measured),
        num_tokens=len(bench.index),
    )
    take_direction(bench.direction, weighted.method, probe, feed.probe_batches(probe_ids))
    bench.measure_estimators(report, epsilons)
    if recipe.lora is None and ranks:
        bench.measure_low_ranks(report, ranks)
    engine.close()
    console.say(f"\n{describe(report)}")
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
        key = "train_path" if num_trusted is None or not measured else "probe_path"
        raise UserError(
            f"data.{key}: found too few sequences within data.cutoff_length; expected some to measure on and others to "
            "take a probe of"
        )
    return measured, others[:probe_size]


def _with_utilities(recipe: Recipe) -> Recipe:
    """Return the recipe, with VCORE in place of another method."""
    method = recipe.method
    if method.name != "vcore":
        method = MethodConfig(name="vcore", kl_budget=0.05, normalization=method.normalization)
    return recipe.model_copy(update={"method": method})


class Bench:
    """Passes over the measured sequences. Methods are collective; tensors hold all ranks' tokens, on the CPU."""

    def __init__(self, engine: Engine, recipe: Recipe, feed: Feed, measured: Sequence[int]):
        """`recipe`: one with utilities (`_with_utilities`)."""
        self.engine, self.recipe = engine, recipe
        self.direction = Direction(engine, rank_passes=recipe.probe.rank_passes)
        self._rounding_seed = recipe.run.seed if recipe.utility.rounding == "stochastic" else None
        self.batches = feed.batches(measured, feed.plan.utility_micro_batch_size_per_rank)
        ids = [torch.tensor(b.sequence_ids, dtype=torch.int64)[b.sequence_index()] for b in self.batches]
        self.index = torch.unique(self.gather(ids), return_inverse=True)[1]
        """`[N]`, each token's sequence, from 0."""

    def measure_estimators(self, report: FidelityReport, epsilons: Sequence[float]) -> None:
        """Compare jvp and finite differences along `self.direction` with the reference."""
        model, settings = self.recipe.model, self.recipe.utility
        with forward_mode(self.engine, self.direction, DTYPES[report.reference_precision]):
            losses, utilities = zip(*(compute_losses_and_utilities(self.engine, b) for b in self.batches), strict=True)
        reference_losses, reference = self.gather(losses), self.gather(utilities)
        base = self.losses()
        report.utility_std = float(reference.std())
        report.loss_error_nats = float((self.gather([base]) - reference_losses).double().square().mean().sqrt())
        report.uniform_weight_overlap = self.agreement(torch.zeros_like(reference), reference).weight_overlap

        def add(estimator: str, utilities: Tensor, is_selected: bool, **others: float) -> None:
            agreement = asdict(self.agreement(utilities, reference))
            report.estimators.append(
                EstimatorAgreement(estimator=estimator, is_selected=is_selected, **agreement, **others)
            )
            at = f", epsilon {others['epsilon']:g}" if others else ""
            console.say(f"{estimator}{at}: Spearman {show(agreement['spearman'])}")

        is_exact = settings.estimator == "jvp" and settings.tangent_precision is None
        add("jvp", self.jvp(self.direction), is_exact)
        if model.precision == "bf16" and model.provider == "huggingface" and has_fp8_units():
            fp8 = self.direction.with_rank(None, fp8_tangents=True)
            add("jvp, FP8 tangents", self.jvp(fp8), settings.tangent_precision == "fp8")
        recipe_epsilon = settings.epsilon
        if recipe_epsilon == "auto":
            recipe_epsilon = choose_epsilon(self.engine, self.direction, self.batches, self._rounding_seed)
            console.say(f"search for epsilon: {recipe_epsilon:.3g}")
        for epsilon in sorted({*epsilons, *({recipe_epsilon} if recipe_epsilon is not None else ())}, reverse=True):
            (losses_below, changed_fraction), (losses_above, _) = (
                compute_perturbed_losses(self.engine, self.direction, self.batches, signed, 1, self._rounding_seed)
                for signed in (epsilon, -epsilon)
            )
            below, above = torch.cat(losses_below), torch.cat(losses_above)
            measured = {"epsilon": epsilon, "changed_fraction": changed_fraction}
            measured["signal_to_noise"] = signal_to_noise(below, base, above)
            difference = self.gather([(base - below) / epsilon])
            add("finite_difference", difference, epsilon == recipe_epsilon, **measured)

    def measure_low_ranks(self, report: FidelityReport, ranks: Sequence[int]) -> None:
        """Compare utilities along low-rank approximations of `self.direction` with those along itself."""
        full = self.jvp(self.direction)
        for rank in sorted(ranks):
            low_rank = self.direction.with_rank(rank)
            energy, agreement = low_rank.measure_energy(), self.agreement(self.jvp(low_rank), full)
            report.low_ranks.append(LowRankDirection(rank=rank, energy=energy, **asdict(agreement)))
            console.say(f"direction of rank {rank}: Spearman {show(agreement.spearman)}")

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """All-gather the parts, always in the same order, from one rank of each sequence-parallel group."""
        is_first = layout.rank("sequence", self.batches[0].sequence_parallel) == 0
        tensors = layout.gather_objects("shards", torch.cat(list(parts)).cpu() if is_first else None)
        return torch.cat([tensor for tensor in tensors if tensor is not None])

    def jvp(self, direction: Direction) -> Tensor:
        return self.gather(compute_jvp_utilities(self.engine, direction, self.batches))

    def losses(self) -> Tensor:
        return torch.cat(compute_losses(self.engine, self.batches, batches_per_pass=1))

    def agreement(self, utilities: Tensor, reference: Tensor) -> Agreement:
        """Compare utilities, and the weights that the recipe's method makes of them, with the reference's."""
        num_sequences, losses = int(self.index.max()) + 1, torch.zeros_like(reference)
        if self.recipe.method.base_measure == "dft":  # weights depend on losses then
            losses = self.gather([self.losses()])
        weights, reference_weights = (
            token_weights(self.recipe.method, Tokens(losses.double(), self.index, num_sequences, s.double())).weights
            for s in (utilities, reference)
        )
        return measure_agreement(utilities, reference, weights, reference_weights, self.index)


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
    within = [one for one in rank_correlations_within(*arrays, sequence_index.numpy()) if one is not None]
    return Agreement(
        spearman=rank_correlation(*arrays),
        spearman_within_sequences=sum(within) / len(within) if within else None,
        relative_error=error if math.isfinite(error) else None,
        weight_overlap=overlap if math.isfinite(overlap) else None,
    )


def train_steps(engine: Engine, recipe: Recipe, feed: Feed, schedule: Schedule) -> Iterator[None]:
    """Take the first steps of a run, one per item; the trainer is built at the first."""
    method, probe, passes = recipe.method, recipe.probe, feed.plan.batches_per_utility_pass
    estimator = build_estimator(method, probe, recipe.utility, engine, batches_per_pass=passes)
    trainer = Trainer(engine, estimator, method, probe, schedule, recipe.run.seed)
    for step in count():
        metrics = trainer.step(step, feed.step(step))
        console.say(f"training step {step + 1}: loss {metrics.values['loss']:.4f}")
        yield


def describe(report: FidelityReport) -> str:
    caption = (
        f"{report.num_sequences} sequences, {report.num_tokens} supervised tokens, after {report.steps_before} steps; "
        f"direction {report.direction} of a probe of {report.probe_batch_size}\n"
        f"Against {report.reference_precision}: standard deviation of utilities {show(report.utility_std, '.3g')}, RMS "
        f"error of a {report.precision} loss {show(report.loss_error_nats, '.3g')} nats"
    )
    rows = [
        [
            f"{'*' if one.is_selected else ' '}{one.estimator}",
            show(one.epsilon, "g"),
            *one.cells(),
            show(one.changed_fraction, ".2%"),
            show(one.signal_to_noise, ".3g"),
        ]
        for one in report.estimators
    ]
    head = ["estimator", "epsilon", *AGREEMENT, "changed", "signal to noise"]
    text = Table(caption, head, rows).text()
    parts = [f"{text}\n* the recipe's. Weight overlap of uniform weights: {show(report.uniform_weight_overlap, '.2%')}"]
    if report.low_ranks:
        caption = "Low-rank direction: utilities along it against those along the full-rank direction"
        rows = [[f"{one.rank}", f"{one.energy:.1%}", *one.cells()] for one in report.low_ranks]
        parts.append(Table(caption, ["probe.rank", "of |v|^2", *AGREEMENT], rows).text())
    bounds = f"at least {RELIABLE_SPEARMAN:g}, for probe.rank {LEAST_RANK_CORRELATION:g} within sequences"
    return "\n\n".join([*parts, "\n  ".join([f"Reliable: Spearman of {bounds}", *judge(report)])])


def judge(report: FidelityReport) -> list[str]:
    """Return the reliable values of each setting."""
    jvp = report.estimators[0]
    lines = [f"utility.estimator=jvp: Spearman {show(jvp.spearman)}"]
    if differences := {one.epsilon: one.spearman or 0.0 for one in report.estimators if one.epsilon is not None}:
        best = max(differences, key=lambda epsilon: differences[epsilon])
        reliable = " ".join(f"{epsilon:g}" for epsilon, value in differences.items() if value >= RELIABLE_SPEARMAN)
        lines.append(f"utility.epsilon: {reliable or 'none'} of those tried; best {best:g}, {show(differences[best])}")
    if report.low_ranks:
        within = {low.rank: low.spearman_within_sequences or 0.0 for low in report.low_ranks}
        ranks = [rank for rank, correlation in within.items() if correlation >= LEAST_RANK_CORRELATION]
        lines.append(f"probe.rank: {f'at least {min(ranks)}' if ranks else 'none of those tried'}")
    return lines


def show(value: float | None, form: str = ".3f") -> str:
    """Format a value; `-` where it is undefined."""
    return "-" if value is None else f"{value:{form}}"
