"""The loop over optimizer steps: batches, a step, a line of metrics, and where the run validates, saves or stops."""

import math
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from .checkpoints import Checkpoints
from .config import Recipe
from .data import Dataset
from .engine import Direction, Engine, NonFiniteGradient, Stops, distributed, watchdog
from .errors import RunStopped
from .feed import Feed
from .step import NonFiniteLoss, StepBatches, train_step
from .track.console import Console
from .track.run_folder import RunFolder
from .track.step_metrics import StepMetrics

RELIABLE_SIGNAL_TO_NOISE = 3.0
"""Below this, a finite difference orders tokens by rounding as much as by utility (Spearman under about 0.9)."""


CHECK_DIFFERENCE_EVERY = 100
"""Optimizer steps between two measurements of a finite difference's noise (and searches for `epsilon: auto`)."""


def run_steps(
    recipe: Recipe,
    engine: Engine,
    feed: Feed,
    direction: Direction | None,
    num_steps: int,
    run_folder: RunFolder | None,
    console: Console,
    validation: Dataset | None,
    checkpoints: Checkpoints,
    num_done: int,
) -> StepMetrics | None:
    """The loop, from step `num_done` (from 0) on. Returns the last step's metrics, None where none was left."""
    console.start_steps(num_steps, num_done)
    started = time.perf_counter()
    metrics = None
    of_checkpoint: dict[str, float] = {}
    stops = Stops(Path(recipe.run.output_dir), recipe.run.time_limit_minutes)
    for k in range(num_done, num_steps):
        watchdog.mark("batches", step=k + 1)
        seed_dropout(recipe.run.seed, k)
        batches = feed.step(k)
        assert batches.waste is not None  # a feed measures it
        uses_difference = recipe.method.name == "vcore" and recipe.utility.estimator == "finite_difference"
        check_difference = uses_difference and k % CHECK_DIFFERENCE_EVERY == 0
        try:
            metrics = train_step(
                engine,
                recipe,
                batches,
                direction,
                learning_rate=learning_rate_at(recipe, k, num_steps),
                batches_per_utility_pass=max(
                    1, feed.plan.utility_micro_batch_size_per_rank // feed.plan.micro_batch_size_per_rank
                ),
                check_difference=check_difference,
                seed=recipe.run.seed + k,
            )
        except (NonFiniteLoss, NonFiniteGradient) as error:
            raise type(error)(f"step {k + 1}: {describe_fault(error, batches)}") from None
        if check_difference:
            warn_of_noise(recipe, metrics, console)
        epoch = (k + 1) * feed.plan.global_batch_size / len(feed.dataset)
        line = {"step": k + 1, "epoch": epoch, **metrics.values, **asdict(batches.waste), **of_checkpoint}
        of_checkpoint = {}
        done = k + 1
        if recipe.run.validate_every is not None and done % recipe.run.validate_every == 0 and done < num_steps:
            line["validation_loss"] = validate(engine, feed, validation)
        if run_folder is not None:
            run_folder.write_metrics(line)
        seconds_left = (time.perf_counter() - started) / (done - num_done) * (num_steps - done)
        log = done % recipe.run.log_every == 0 or done == num_steps
        console.step(done, num_steps, metrics.values, seconds_left, log)
        reason = stops.agreed_reason()
        if reason is not None or checkpoints.due(done, num_steps):
            watchdog.mark("checkpoint")
            if run_folder is not None:
                run_folder.flush()  # no checkpoint without the lines of its steps; its cost stands in the next line
            saved = checkpoints.save(done, engine, direction, feed)
            of_checkpoint = saved.metrics
            stops.record_save(saved.seconds)
            if reason is not None:
                console.end_steps()
                raise RunStopped(
                    f"stopped by {reason} after step {done} of {num_steps} and saved in {saved.folder}; the same "
                    "command goes on from there"
                )
    console.end_steps()
    return metrics


def learning_rate_at(recipe: Recipe, k: int, num_steps: int) -> float:
    """Of optimizer step k, from 0: linear warm-up that reaches the peak, then half a cosine to 0 (or constant)."""
    peak = recipe.optimizer.learning_rate
    num_warmup_steps = math.ceil(recipe.schedule.warmup_ratio * num_steps)
    if k < num_warmup_steps:
        return peak * (k + 1) / num_warmup_steps
    if recipe.schedule.kind == "constant":
        return peak
    progress = (k - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def seed_dropout(seed: int, k: int) -> None:
    """Makes the dropout of step k (from 0) a function of run, step and rank, so that resuming needs no generator's
    state; different on every rank. Everything else that is random has its own generator."""
    torch.manual_seed(int(np.random.SeedSequence([seed, k, distributed.rank()]).generate_state(1, np.uint64)[0]))


def describe_fault(error: Exception, batches: StepBatches) -> str:
    """The message of a non-finite loss or gradient, with the sequences of this step where the error names none."""
    if isinstance(error, NonFiniteLoss):
        return f"{error}. The parameters were not updated."
    per_rank = distributed.gather_objects([i for batch in batches.main for i in batch.sequence_ids])
    ids = "; ".join(f"rank {rank}: sequence ids {found}" for rank, found in enumerate(per_rank))
    return f"{error}; it is summed over {ids}. The parameters were not updated."


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


def validate(engine: Engine, feed: Feed, dataset: Dataset | None) -> float | None:
    """Mean over held-out sequences of the mean token loss, nats; None without held-out data. A collective."""
    if dataset is None:
        return None
    watchdog.mark("validation")
    total = num_sequences = 0.0
    with engine.without_gradient():
        every_id = range(len(dataset))
        for batch in feed.batches(every_id, feed.plan.utility_micro_batch_size_per_rank, dataset):
            losses = engine.token_losses(batch).cpu()
            num_tokens = batch.num_supervised_tokens()
            sums = torch.zeros(batch.num_sequences).index_add_(0, batch.sequence_index(), losses)
            total += float((sums / num_tokens.clamp_min(1)).sum())
            num_sequences += float((num_tokens > 0).sum())
    total, num_sequences = distributed.sum_over_ranks([total, num_sequences])
    return total / num_sequences


def describe_waste(feed: Feed, num_done: int, num_steps: int) -> str:
    steps = range(num_done, min(num_steps, num_done + 50)) or range(1)
    waste = feed.waste(steps)
    return (
        f"Batches: {waste.padding_share:.2%} padding, slowest rank {waste.rank_imbalance:.3f} x mean "
        f"(main batches of steps {steps[0] + 1} to {steps[-1] + 1})"
    )
