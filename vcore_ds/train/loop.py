"""The loop over optimizer steps: batches, a step, a line of metrics, and where the run validates, saves or stops."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import Batch
from vcore_ds.data.dataset import Dataset
from vcore_ds.data.step_batches import StepBatches
from vcore_ds.distributed import layout
from vcore_ds.distributed.positions import mark
from vcore_ds.distributed.process_group import first_rank_first
from vcore_ds.distributed.stops import Stops
from vcore_ds.engine.non_finite import NonFiniteGradient, NonFiniteLoss, sequences_by_rank
from vcore_ds.engine.zero3 import Engine
from vcore_ds.errors import RunStopped
from vcore_ds.progress import Progress, duration
from vcore_ds.track.console import Console
from vcore_ds.track.metrics_log import MetricsLog
from vcore_ds.track.run_notes import RELIABLE_SIGNAL_TO_NOISE
from vcore_ds.track.step_metrics import StepMetrics, StepRecorder
from vcore_ds.track.token_gather import record_tokens
from vcore_ds.track.token_records import record_steps
from vcore_ds.train.checkpoints import Checkpoints
from vcore_ds.train.feed import Feed
from vcore_ds.train.followed import FollowedTraces, record_followed
from vcore_ds.train.setup import learning_rate_at, measures_noise, step_seed
from vcore_ds.train.step import train_step
from vcore_ds.train.throughput import Throughput
from vcore_ds.utility.estimators import Estimator


@dataclass(frozen=True)
class Training:
    """What a run has while it trains."""

    recipe: Recipe
    engine: Engine
    estimator: Estimator
    feed: Feed
    validation: dict[str, Dataset]
    """Held-out sequences by the name of their set."""
    followed: FollowedTraces
    num_steps: int
    """Optimizer steps of the whole run."""
    checkpoints: Checkpoints
    throughput: Throughput
    metrics_log: MetricsLog | None
    """On rank 0; None on the others."""
    console: Console
    advice_if_long: str = ""
    """What would make the run shorter; empty for nothing."""


def run_steps(training: Training, num_done: int) -> StepMetrics | None:
    """The loop, after the first `num_done` steps. Returns the last step's metrics, None where no step was left. A
    collective.

    Raises:
        NonFiniteLoss, NonFiniteGradient: with step, rank and sequence ids, on all ranks alike.
        RunStopped: on all ranks alike, after a checkpoint.
        UserError: on all ranks alike, where metrics.jsonl cannot be written before a checkpoint.
    """
    recipe, console, num_steps = training.recipe, training.console, training.num_steps
    console.start_steps(num_steps, num_done)
    started = time.perf_counter()
    metrics = None
    of_checkpoint: dict[str, float] = {}
    recorded = set(record_steps(num_steps, recipe.run.num_token_records))
    stops = Stops(Path(recipe.run.output_dir), recipe.run.time_limit_minutes)
    for k in range(num_done, num_steps):
        mark("batches", step=k + 1)
        batches = training.feed.step(k)
        done = k + 1
        if done in recorded:
            batches = replace(batches, followed=training.followed.batches)
        metrics = take_step(training, k, batches, keep_tokens=done in recorded)
        record_step(training, done, batches, metrics)
        seconds = metrics.values["seconds"]
        assert seconds is not None  # every step has a length
        seconds -= metrics.values.get("seconds_followed") or 0.0
        rates = training.throughput.of_step(batches.main_lengths, batches.probe_lengths, seconds)
        line = {
            "step": done,
            "epoch": training.feed.epoch(done),
            **metrics.values,
            **rates,
            **of_checkpoint,
            **batches.measured,
        }
        of_checkpoint = {}
        if recipe.run.validate_every is not None and done % recipe.run.validate_every == 0 and done < num_steps:
            line |= {f"validation_loss{name and '_'}{name}": loss for name, loss in validate(training).items()}
        if training.metrics_log is not None:
            training.metrics_log.write(line)
        seconds_left = (time.perf_counter() - started) / (done - num_done) * (num_steps - done)
        log = done % recipe.run.log_every == 0 or done == num_steps
        console.step(done, num_steps, line, seconds_left, log)
        if done == num_done + 1:
            say_rest(console, seconds * (num_steps - done), num_steps - done, training.advice_if_long)
        reason = stops.agreed_reason()
        if reason is not None or training.checkpoints.due(done, num_steps):
            mark("checkpoint")
            # No checkpoint without the lines of its steps; the log is on rank 0, and where it fails all ranks fail.
            first_rank_first(lambda: None if training.metrics_log is None else training.metrics_log.flush())
            saved = training.checkpoints.save(done, training.engine, training.estimator, training.feed)
            of_checkpoint = saved.metrics  # its cost stands in the next line
            stops.record_save(saved.seconds)
            if reason is not None:
                console.end_steps()
                raise RunStopped(
                    f"stopped by {reason} after step {done} of {num_steps} and saved in {saved.folder}; the same "
                    "command resumes the run"
                )
    console.end_steps()
    return metrics


LONG_SECONDS = 15 * 60.0
"""Rest of a run after which advice is given."""


def say_rest(console: Console, seconds: float, num_left: int, advice_if_long: str) -> None:
    """Says after the first step how long the others take, unless they take less than a minute.

    Args:
        seconds: expected of all of them.
        advice_if_long: see `Training`.
    """
    if seconds < 60:
        return
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + seconds))
    rest = f"the other {num_left:,} step(s) take about {duration(seconds)}, until {end}"
    if advice_if_long and seconds > LONG_SECONDS:
        console.warn(f"{rest}. {advice_if_long}")
    else:
        console.say(f"Time: {rest}")


def take_step(training: Training, k: int, batches: StepBatches, *, keep_tokens: bool) -> StepMetrics:
    """Optimizer step k, from 0, with a warning where its utilities are noise. A collective.

    `keep_tokens`: the result has this rank's single tokens.
    """
    recipe = training.recipe
    measure_noise = measures_noise(recipe, k)
    try:
        metrics = train_step(
            training.engine,
            recipe,
            batches,
            training.estimator,
            StepRecorder(training.engine.device, keep_tokens=keep_tokens),
            learning_rate=learning_rate_at(recipe, k, training.num_steps),
            measure_noise=measure_noise,
            seed=step_seed(recipe, k),
        )
    except (NonFiniteLoss, NonFiniteGradient) as error:
        raise type(error)(f"step {k + 1}: {describe_fault(error, batches)}") from None
    if measure_noise:
        warn_of_noise(recipe, metrics, training.console)
    return metrics


def record_step(training: Training, done: int, batches: StepBatches, metrics: StepMetrics) -> None:
    """Writes the tokens that step `done`, from 1, has measured one by one, if any. A collective."""
    folder = Path(training.recipe.run.output_dir)
    if metrics.tokens is not None:
        record_tokens(
            folder,
            done,
            metrics.tokens,
            training.console,
            sequence_parallel=batches.main[0].sequence_parallel,
            first_trusted_id=training.feed.first_trusted_id,
            seed=training.recipe.run.seed,
        )
    if batches.followed:
        record_followed(folder, done, metrics.followed, training.followed.origins, training.console)


def describe_fault(error: Exception, batches: StepBatches) -> str:
    """The message of a non-finite loss or gradient, with the sequences of this step where the error names none."""
    if isinstance(error, NonFiniteLoss):
        return f"{error}. The parameters were not updated."
    ids = [i for batch in batches.main for i in batch.sequence_ids]
    sequences = sequences_by_rank(ids, batches.main[0].sequence_parallel)
    return f"{error}; it is summed over {sequences}. The parameters were not updated."


def warn_of_noise(recipe: Recipe, metrics: StepMetrics, console: Console) -> None:
    """Says with the measured numbers when a finite difference divides rounding by epsilon."""
    epsilon, snr, changed = (metrics.values[key] for key in ("epsilon", "signal_to_noise", "changed_fraction"))
    assert epsilon is not None and snr is not None and changed is not None  # measured in this step
    how_chosen = " (auto)" if recipe.utility.epsilon == "auto" else ""
    if snr < RELIABLE_SIGNAL_TO_NOISE:
        console.warn(
            f"utility.epsilon {epsilon:.3g}{how_chosen} does not resolve the loss in {recipe.model.precision}: the "
            f"perturbation changed {changed:.1%} of the trainable parameters, and the loss change it made is {snr:.2f} "
            f"times its error (at least {RELIABLE_SIGNAL_TO_NOISE:g} is needed). The weights of this run are mostly "
            "noise. Use utility.estimator=jvp, which has no epsilon and is right in this precision."
        )
    elif how_chosen:
        console.say(f"epsilon {epsilon:.3g}{how_chosen}: the loss change is {snr:.1f} times its error")


def validate(training: Training) -> dict[str, float]:
    """Mean over the sequences of each held-out set of the mean token loss, nats. A collective."""
    mark("validation")
    feed = training.feed
    micro_batch_size = feed.plan.utility_micro_batch_size_per_rank
    batches = {
        name: feed.batches(range(len(dataset)), micro_batch_size, dataset)
        for name, dataset in training.validation.items()
    }
    num_tokens = sum(batch.input_ids.numel() for of_set in batches.values() for batch in of_set)
    with training.console.progress("Evaluating held-out sequences", num_tokens) as progress:
        return {name: held_out_loss(training.engine, of_set, progress) for name, of_set in batches.items()}


def held_out_loss(engine: Engine, batches: list[Batch], progress: Progress) -> float:
    """Mean over one set's sequences of the mean token loss, nats. A collective.

    Args:
        batches: this rank's.
        progress: counts their tokens.
    """
    total = num_sequences = 0.0
    with engine.without_gradient():
        for batch in batches:
            losses = engine.token_losses(batch).cpu()
            num_tokens = batch.num_supervised_tokens()
            sums = torch.zeros(batch.num_sequences).index_add_(0, batch.sequence_index(), losses)
            total += float((sums / num_tokens.clamp_min(1)).sum())
            num_sequences += float((num_tokens > 0).sum())
            progress.advance(batch.input_ids.numel())
    total, num_sequences = layout.sum_over("data", [total, num_sequences], batches[0].sequence_parallel)
    return total / num_sequences
