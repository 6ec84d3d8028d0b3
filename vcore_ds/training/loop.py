"""The training loop: optimizer steps, metrics, validation, checkpoints and stops."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from vcore_ds.common.errors import RunFailed, RunStopped, UserError
from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.common.text import Progress
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.sections import ProbeConfig, RunConfig
from vcore_ds.data.batches import Batch, StepBatches
from vcore_ds.data.dataset import Dataset
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.distributed.position import get_position, mark
from vcore_ds.distributed.process_group import run_on_ranks_in_turn
from vcore_ds.distributed.signals import Stops, stop_signals
from vcore_ds.engine.zero3 import Engine, NonFiniteGradient, NonFiniteLoss
from vcore_ds.method.objective import Normalization, sequence_shares
from vcore_ds.models.description import read_model
from vcore_ds.planning.hardware import peak_flops
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import StepPasses
from vcore_ds.training import console
from vcore_ds.training.checkpoints import Checkpoints
from vcore_ds.training.console import explain_steps
from vcore_ds.training.faults import describe_fault, explain_fault
from vcore_ds.training.feed import Feed
from vcore_ds.training.followed import FollowedTraces, gather_followed, measure_followed
from vcore_ds.training.metrics_log import MetricsLog, name_held_out, record_end
from vcore_ds.training.profile import profiled_step
from vcore_ds.training.run_folder import read_run_metrics
from vcore_ds.training.run_notes import RELIABLE_SIGNAL_TO_NOISE, describe_divergence, list_losses
from vcore_ds.training.schedule import Schedule
from vcore_ds.training.step import train_step
from vcore_ds.training.step_metrics import StepMetrics, StepRecorder, gather_record, write_or_warn
from vcore_ds.training.token_records import record_steps
from vcore_ds.utility.estimators import Estimator, FiniteDifference

MEASURE_NOISE_EVERY = 100
"""Optimizer steps between two measurements of a finite difference's noise (and searches for `epsilon: auto`)."""


@dataclass(frozen=True)
class Throughput:
    """Converts the seconds of a step into tokens/s and the share of the devices' peak (MFU)."""

    shape: ModelShape  # of the unsharded model
    passes: StepPasses | None  # the passes that a step needs; None for a model of unknown sizes
    peak_flops: float | None  # dense bf16 FLOP/s of all ranks together; None if a device's is unknown, as on CPUs

    def compute_rates(
        self, main_lengths: Sequence[int], probe_lengths: Sequence[int], seconds: float
    ) -> dict[str, float | int | None]:
        """Compute tokens, FLOP and rates of a step, by their names in the metrics; docs/planning.md has the formulas.
        `main_lengths`, `probe_lengths`: tokens of each sequence of the global batches, without padding; empty for a
        step without a probe."""
        num_tokens = sum(main_lengths)
        values: dict[str, float | int | None] = {"tokens": num_tokens, "tokens_per_second": num_tokens / seconds}
        values |= dict.fromkeys(("flops_training", "flops_extra", "utilization", "utilization_training"))
        if self.passes is not None:
            training, extra = self.passes.flops(self.shape, main_lengths, probe_lengths)
            values |= {"flops_training": training, "flops_extra": extra}
            if self.peak_flops is not None:
                peak = self.peak_flops * seconds
                values |= {"utilization": (training + extra) / peak, "utilization_training": training / peak}
        return values


def build_throughput(model: str, passes: StepPasses | None) -> Throughput:
    """Make the converter for the ranks of this job. A collective. `model`: model.path."""
    flops = peak_flops(torch.cuda.get_device_name(device())) if device().type == "cuda" else None
    peaks = [peak for peak in layout.gather_objects("job", flops) if peak is not None]
    return Throughput(read_model(model).shape, passes, sum(peaks) if len(peaks) == layout.size("job") else None)


@dataclass(frozen=True)
class Trainer:
    """Everything that takes optimizer steps; `vcore-ds fidelity` uses it too."""

    engine: Engine
    estimator: Estimator
    method: MethodConfig
    probe: ProbeConfig
    schedule: Schedule
    seed: int  # of the run

    def measures_noise(self, k: int) -> bool:
        """Whether step k, from 0, measures the noise of a finite difference."""
        return isinstance(self.estimator, FiniteDifference) and k % MEASURE_NOISE_EVERY == 0

    def step_seed(self, k: int) -> int:
        """Seed of the random numbers of step k, from 0."""
        return torch_seed(Stream.STOCHASTIC_ROUNDING, self.seed, k)

    def step(self, k: int, batches: StepBatches, *, keep_tokens: bool = False) -> StepMetrics:
        """Take optimizer step k, from 0. A collective. `keep_tokens`: also return this rank's single tokens. Raises
        NonFiniteLoss, NonFiniteGradient with step, rank and sequence ids, on all ranks alike."""
        try:
            return train_step(
                self.engine,
                self.method,
                self.probe,
                batches,
                self.estimator,
                StepRecorder(self.engine.device, keep_tokens=keep_tokens),
                learning_rate=self.schedule.learning_rate(k),
                measure_noise=self.measures_noise(k),
                seed=self.step_seed(k),
            )
        except (NonFiniteLoss, NonFiniteGradient) as error:
            raise type(error)(f"step {k + 1}: {describe_fault(error, batches)}") from None


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    feed: Feed
    validation: dict[str, Dataset]  # held-out sequences by the name of their set
    followed: FollowedTraces


@dataclass(frozen=True)
class Run:
    """A run in progress."""

    settings: RunConfig
    trainer: Trainer
    data: RunData
    checkpoints: Checkpoints
    metrics_log: MetricsLog | None  # on rank 0; None on the others
    throughput: Throughput

    @property
    def folder(self) -> Path:
        return Path(self.settings.output_dir)


def run_to_end(run: Run, num_done: int) -> tuple[StepMetrics | None, dict[str, float] | None]:
    """`run_steps`, whose failure or stop is recorded in the run's folder. A collective."""
    # After the steps a signal ends the process at once: the last checkpoint holds the final state.
    with stop_signals.deferred():
        try:
            return run_steps(run, num_done)
        except Exception as error:
            if layout.is_first() or not isinstance(error, RunFailed | RunStopped):  # these are raised on all ranks
                record_end(run.folder, get_position().step, error)
            # Even if this rank fails alone: the background threads of the others continue while their main threads
            # wait for it, and the watchdog finds dead ranks.
            run.checkpoints.finish_after_failure()
            raise


def run_steps(run: Run, num_done: int) -> tuple[StepMetrics | None, dict[str, float] | None]:
    """Take the steps after the first `num_done`; return the last step's metrics, None if none remained, and the
    held-out losses after it, None if they were not measured. A collective. Raises on all ranks alike NonFiniteLoss,
    NonFiniteGradient with step, rank and sequence ids, RunStopped after a checkpoint, and UserError if metrics.jsonl
    cannot be written before a checkpoint."""
    settings, feed = run.settings, run.data.feed
    num_steps = run.trainer.schedule.num_steps
    if num_done < num_steps:
        console.say(explain_steps(run.trainer.method, run.trainer.probe))
    console.start_steps(num_steps, num_done)
    started = time.perf_counter()
    metrics, has_diverged, losses_after = None, False, None
    training_losses: list[float] = []  # of all steps on rank 0, which warns of divergence
    if num_done and layout.is_first():
        with suppress(UserError):  # the user may have removed lines
            training_losses = list_losses(read_run_metrics(run.folder))
    recorded = set(record_steps(num_steps, settings.num_token_records))
    stops = Stops(run.folder, settings.time_limit_minutes)
    for k in range(num_done, num_steps):
        mark("batches", step=k + 1)
        batches, done = feed.step(k), k + 1
        with profiled_step(settings.profile, run.folder, done):
            try:
                metrics = run.trainer.step(k, batches, keep_tokens=done in recorded)
            except (NonFiniteLoss, NonFiniteGradient) as error:
                cause = explain_fault(run.trainer.engine, feed, batches, metrics)
                raise type(error)(f"{error} {cause}.") from None
        if run.trainer.measures_noise(k):
            warn_of_noise(run.trainer, metrics)
        loss = metrics.values["loss"]
        seconds = metrics.values["seconds"]
        assert loss is not None and seconds is not None  # of every step
        training_losses.append(loss)
        seconds_followed = record_step(run, done, batches, metrics)
        line = {
            "step": done,
            "epoch": feed.epoch(done),
            **metrics.values,
            **seconds_followed,
            **run.throughput.compute_rates(batches.main_lengths, batches.probe_lengths, seconds),
            **run.checkpoints.take_metrics(),
            **batches.measured,
        }
        losses: dict[str, float] = {}
        if run.data.validation and settings.validates(done, num_steps):
            losses = validate(run.trainer, run.data)
            line |= name_held_out(losses)
            losses_after = losses if done == num_steps else None
        if run.metrics_log is not None:
            run.metrics_log.write(line)
        seconds_left = (time.perf_counter() - started) / (done - num_done) * (num_steps - done)
        console.show_step(done, num_steps, line, seconds_left, log=done % settings.log_every == 0 or done == num_steps)
        if not has_diverged and (diverges := describe_divergence(training_losses)):
            console.warn(f"step {done}: {diverges}")
            has_diverged = True
        run.checkpoints.collect()
        reason = stops.agree_on_reason()
        if reason is not None or run.checkpoints.is_due(done, num_steps):
            mark("checkpoint")
            # A checkpoint must not outlive the metrics of its steps; if rank 0 cannot write them, all ranks fail.
            run_on_ranks_in_turn(lambda: None if run.metrics_log is None else run.metrics_log.flush())
            is_last = reason is not None or done == num_steps
            folder, seconds = run.checkpoints.save(
                done, run.trainer.engine, run.trainer.estimator, losses, is_last=is_last
            )
            stops.record_save(seconds, run.checkpoints.seconds_last_save)
            if reason is not None:
                console.end_steps()
                raise RunStopped(
                    f"stopped by {reason} after step {done} of {num_steps} and saved in {folder}; the same "
                    "command resumes the run"
                )
    console.end_steps()
    return metrics, losses_after


def record_step(run: Run, done: int, batches: StepBatches, metrics: StepMetrics) -> dict[str, float]:
    """Write the tokens that step `done`, from 1, has kept, if any, and the followed traces, which are measured now;
    return the seconds that these took, by name in the metrics. A collective."""
    if metrics.tokens is None:
        return {}
    trainer, data = run.trainer, run.data
    size, first_trusted_id = batches.main[0].sequence_parallel, data.feed.first_trusted_id
    record = gather_record(done, metrics.tokens, size, first_trusted_id, run.settings.seed)
    write_or_warn(run.folder, record, "step")
    if not data.followed.batches:
        return {}
    started, seed = time.perf_counter(), trainer.step_seed(done - 1)
    measured = measure_followed(trainer.engine, trainer.method, data.followed, trainer.estimator, seed=seed)
    write_or_warn(run.folder, gather_followed(done, measured, len(data.followed.origins)), "followed")
    return {"seconds_followed": time.perf_counter() - started}


def warn_of_noise(trainer: Trainer, metrics: StepMetrics) -> None:
    """Warn if the loss change of a finite difference is mostly rounding."""
    assert isinstance(trainer.estimator, FiniteDifference)  # others measure no noise
    epsilon, snr, changed = (metrics.values[key] for key in ("epsilon", "signal_to_noise", "changed_fraction"))
    assert epsilon is not None and snr is not None and changed is not None  # measured in this step
    how_chosen = " (auto)" if trainer.estimator.epsilon == "auto" else ""
    if snr < RELIABLE_SIGNAL_TO_NOISE:
        console.warn(
            f"utility.epsilon {epsilon:.3g}{how_chosen} does not resolve the loss: the "
            f"perturbation changed {changed:.1%} of the trainable parameters, and the loss change it made is {snr:.2f} "
            f"times its error (at least {RELIABLE_SIGNAL_TO_NOISE:g} is needed). The weights of this run are mostly "
            "noise. Use utility.estimator=jvp, which has no epsilon, or where the architecture has no jvp "
            "model.precision=fp32."
        )
    elif how_chosen:
        console.say(f"epsilon {epsilon:.3g}{how_chosen}: the loss change is {snr:.1f} times its error")


def validate(trainer: Trainer, data: RunData) -> dict[str, float]:
    """Compute the loss of each held-out set. A collective."""
    mark("validation")
    feed, normalization = data.feed, trainer.method.normalization
    micro_batch_size = feed.plan.utility_micro_batch_size_per_rank
    batches = {
        name: feed.batches(range(len(dataset)), micro_batch_size, dataset) for name, dataset in data.validation.items()
    }
    num_tokens = sum(batch.input_ids.numel() for set_batches in batches.values() for batch in set_batches)
    with console.progress("Evaluating held-out sequences", num_tokens) as progress:
        return {
            name: held_out_loss(trainer.engine, set_batches, normalization, progress)
            for name, set_batches in batches.items()
        }


def held_out_loss(engine: Engine, batches: list[Batch], normalization: Normalization, progress: Progress) -> float:
    """Loss of one set with uniform weights, nats: the mean over its sequences of their tokens' mean, or over all tokens
    (`normalization`). A collective. `batches`: this rank's; `progress` counts their tokens."""
    counts, total = engine.count_globally(batches), 0.0
    with engine.without_gradient():
        for batch in batches:
            losses = engine.token_losses(batch).cpu()
            num_tokens = batch.num_supervised_tokens()
            sums = torch.zeros(batch.num_sequences, dtype=losses.dtype).index_add_(0, batch.sequence_index(), losses)
            shares = sequence_shares(num_tokens, counts, normalization)
            total += float((shares * sums / num_tokens.clamp_min(1)).sum())
            progress.advance(batch.input_ids.numel())
    return engine.sum_over_data([total], batches[0].sequence_parallel)[0]
