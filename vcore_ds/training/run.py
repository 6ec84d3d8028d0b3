"""A run from start to end: lock and resume, data, engine, train, result."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import RunLock
from vcore_ds.common.paths import write_atomically, writing
from vcore_ds.common.text import count
from vcore_ds.config.data_section import WRITTEN_BY_COMMANDS
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.schema import Recipe, flat_values
from vcore_ds.data.dataset import Dataset, SubsetDataset, find_token_store
from vcore_ds.data.prepare.sources import check_inputs
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.distributed.position import mark
from vcore_ds.distributed.process_group import run_on_first_rank
from vcore_ds.distributed.watchdog import watching
from vcore_ds.engine.export_shards import save_hugging_face
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.architecture_check import check_architecture, count_parameters
from vcore_ds.models.cpu_matmul import computes_in_fp32
from vcore_ds.models.model_folder import describe_end_tokens
from vcore_ds.planning.batch_plan import BatchPlan
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.fit import Available, MemoryPlan, describe_memory, describe_recomputation, plan_memory
from vcore_ds.planning.passes import ParameterCounts, derive_needed_passes
from vcore_ds.planning.settings import PlanSettings, derive_plan_settings
from vcore_ds.training import console, run_folder, start_screen
from vcore_ds.training.checkpoint_read import (
    Checkpoint,
    RunState,
    check_data,
    compute_frozen_digest,
    find_common_checkpoint,
    find_newest,
    list_data_digests,
    list_shapes,
    load_checkpoint,
    set_aside_newer,
)
from vcore_ds.training.checkpoints import Checkpoints, check_compared, make_digest, say_best
from vcore_ds.training.faults import advising_on_memory, warn_of_non_finite
from vcore_ds.training.feed import DataReader, Feed, build_feed
from vcore_ds.training.followed import choose_followed
from vcore_ds.training.loop import Run, RunData, Trainer, build_throughput, run_to_end, validate
from vcore_ds.training.metrics_log import MetricsLog, name_held_out, start_trackers
from vcore_ds.training.model_card import Kind, check_export, make_model_card
from vcore_ds.training.profile import check_profile
from vcore_ds.training.run_folder import begin_branch, can_resume
from vcore_ds.training.schedule import Schedule, derive_schedule, warn_of_repeats
from vcore_ds.training.setup import build_engine, build_estimator, plan_ranks, start_ranks
from vcore_ds.training.start_checks import (
    check_approximation,
    check_derivatives,
    check_memory,
    check_start,
    find_available_memory,
)
from vcore_ds.training.step_metrics import StepMetrics
from vcore_ds.training.weighting import check_function


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    folder: Path
    export_folder: Path
    validation_losses_before: dict[str, float]  # nats, by name of the held-out set
    validation_losses_after: dict[str, float]
    last_step: StepMetrics | None  # None if the run was resumed after its last step


def train(recipe: Recipe, *, says_next: bool = True) -> RunResult:
    """Run a recipe. A collective. `says_next`: print the command for the run's report at the end.
    Raises UserError for mistakes of the user, before anything is written; NonFiniteLoss, NonFiniteGradient with step,
    rank and sequence ids, without an update; RunStopped on all ranks alike, after a checkpoint."""
    resumes, settings = can_resume(recipe), derive_plan_settings(recipe)
    check_inputs(recipe.model.path, recipe.data)  # before the model, whose lookup takes a minute without a connection
    check_architecture(settings)
    start_ranks(recipe.engine, recipe.parallel)
    lock = RunLock(Path(recipe.run.output_dir))
    try:
        with watching(recipe.engine.lost_rank_seconds, recipe.engine.timeout_minutes):
            result = train_together(recipe, settings, lock, resumes)
            if says_next and layout.is_first():
                console.say(f"Next: vcore-ds report {shlex.quote(str(result.folder))}")
            return result
    finally:
        lock.release()


def train_together(recipe: Recipe, settings: PlanSettings, lock: RunLock, resumes: bool) -> RunResult:
    """Run a recipe in the process group. A collective. `resumes`: whether this rank sees a run to resume."""
    with console.collecting_notes() as notes:
        check_function(recipe.method, device())
        opened = open_run(recipe, settings, lock, resumes)
        available = find_available_memory()
        memory = describe_start(recipe, opened, available)
        check_memory(memory, available, recipe.engine)
        tokenizer = opened.reader.tokenizer
        run_on_first_rank(lambda: check_export(recipe.model, recipe.lora, recipe.method, recipe.data, tokenizer))
        with advising_on_memory(memory):
            return run_opened(recipe, opened, lock, memory, notes)


def run_opened(
    recipe: Recipe, opened: "OpenedRun", lock: RunLock, memory: MemoryPlan | None, notes: Sequence[str]
) -> RunResult:
    """Load the model, train and write the result. A collective. `notes`: on the start, to which checks add."""
    mark("loading the model", is_loading=True)
    activations = None if memory is None else memory.settings.activations
    engine = build_engine(opened.settings, opened.deepspeed_config, activations)
    # Computed now: the weights on disk may change before the first save.
    has_adapters = recipe.lora is not None
    frozen_digest = run_on_first_rank(lambda: compute_frozen_digest(recipe.model.path, has_adapters=has_adapters))
    trainer = make_trainer(recipe, opened, engine, frozen_digest)
    passes = None if memory is None else derive_needed_passes(opened.settings, memory.settings)
    log, start = begin_folder(recipe, opened, lock, trainer, frozen_digest, notes)

    run = Run(
        recipe.run,
        trainer,
        opened.data,
        Checkpoints(
            opened.checkpoints,
            recipe.checkpoint,
            dump_recipe(recipe),
            start,
            branch_step=opened.schedule.first_decay_step if opened.schedule.kind == "wsd" else None,
            probe_every=recipe.probe.every,
        ),
        log,
        build_throughput(recipe.model.path, passes),
    )
    last_step, losses = run_to_end(run, opened.num_done)
    if losses is None:
        losses = validate(trainer, run.data)
    export_folder = run_folder.export_folder(run.folder, is_adapter=has_adapters)
    result = RunResult(run.folder, export_folder, start.validation_losses_before, losses, last_step)
    write_result(recipe, run, result, opened.reader.tokenizer, frozen_digest)
    console.say(summarize(result))
    if layout.is_first():
        say_best(run.checkpoints, opened.schedule.num_steps)
    engine.close()
    return result


@dataclass(frozen=True)
class OpenedRun:
    """A run whose data are read, before its model is loaded."""

    settings: PlanSettings
    deepspeed_config: dict[str, Any]
    checkpoints: Path  # folder of its checkpoints
    reader: DataReader
    data: RunData
    schedule: Schedule
    checkpoint: Checkpoint | None  # to resume from
    newest_step: int  # of all checkpoints, which may be of another schedule; 0 without one
    resumes: bool  # whether the folder holds a run, or a branch of one

    @property
    def num_done(self) -> int:
        """Optimizer steps that are done."""
        return 0 if self.checkpoint is None else self.checkpoint[1].step


def open_run(recipe: Recipe, settings: PlanSettings, lock: RunLock, resumes: bool) -> OpenedRun:
    """Plan the batches, find the run's folder and checkpoint, and read its data. A collective, which writes nothing but
    a new branch."""
    plan = plan_ranks(settings)
    config = deepspeed_config(settings, plan)
    # Rank 0 decides: if nodes do not share the folder, ranks could enter different collectives.
    resumes = layout.gather_objects("job", resumes)[0]
    folder, branch = Path(recipe.run.output_dir), recipe.checkpoint.branch_from
    checkpoints, checkpoint = folder / "checkpoints", None
    run_on_first_rank(lambda: run_folder.check_output_folder(folder))
    if resumes:
        run_on_first_rank(lambda: lock_run_folder(recipe, lock, True))
    elif branch is not None:
        console.say(f"This run begins from {branch}")
        run_on_first_rank(lambda: lock.acquire(console.say))
        run_on_first_rank(lambda: begin_branch(Path(branch), folder))
        resumes = True
    if resumes:
        checkpoint = find_newest(checkpoints)
        if checkpoint is None:
            console.say(f"{folder} holds this run without a checkpoint: it begins at its first step")

    mark("reading data", is_loading=True)
    adapter = recipe.lora.adapter if recipe.lora else None
    reader = DataReader(recipe.data, recipe.model.path, load_tokenizer(recipe.model.path), adapter)
    feed, validation = read_data(recipe, plan, reader)
    learning_rate, per_step = recipe.optimizer.learning_rate, feed.main_order.batch_size
    schedule = derive_schedule(recipe.schedule, learning_rate, len(feed.dataset), per_step)
    check_profile(recipe.run.profile, schedule.num_steps)
    check_compared(recipe.checkpoint, recipe.run, schedule.num_steps)
    newest_step = 0 if checkpoint is None else checkpoint[1].step
    if checkpoint is not None:
        check_data(checkpoint, feed, recipe.data)
        checkpoint = find_common_checkpoint(checkpoints, checkpoint, schedule, feed)
    followed = choose_followed(recipe.run, recipe.data, recipe.method, feed, validation)
    data = RunData(feed, validation, followed)
    return OpenedRun(settings, config, checkpoints, reader, data, schedule, checkpoint, newest_step, resumes)


def lock_run_folder(recipe: Recipe, lock: RunLock, resumes: bool) -> None:
    """Lock the run's folder for this job, on rank 0. Raises UserError if another job holds it, or has worked in it
    since this job started."""
    lock.acquire(console.say)
    if can_resume(recipe) != resumes:
        raise UserError(
            f"run.output_dir: {recipe.run.output_dir}: another job has worked there since this one began; expected one "
            "job at a time. The same command resumes what is there"
        )


def read_data(recipe: Recipe, plan: BatchPlan, reader: DataReader) -> tuple[Feed, dict[str, Dataset]]:
    """Read the data: the batches of every step, and the held-out sequences by name of their set. A collective."""
    data, seed = recipe.data, recipe.run.seed
    reader.read_stores(path for key, path in data.paths().items() if key not in WRITTEN_BY_COMMANDS)
    training = reader.read_training_data(recipe.method, seed)
    validation = reader.read_validation(training)
    probe = None
    if data.probe_path is not None and (recipe.method.uses_utilities or data.trusted_share > 0):
        probe = reader.read_store(data.probe_path)
    feed = build_feed(recipe.method, recipe.probe, plan, training, reader.pad_token_id, seed=seed, probe_dataset=probe)
    return feed, validation


def describe_start(recipe: Recipe, opened: OpenedRun, available: Available) -> MemoryPlan | None:
    """Print a description of the run, and return its estimated memory. A collective."""
    settings, config = opened.settings, opened.deepspeed_config
    feed, num_done, num_steps = opened.data.feed, opened.num_done, opened.schedule.num_steps
    utilization = feed.utilization(num_done, num_steps)
    parameters = count_parameters(recipe.model.path, recipe.lora, recipe.parallel.tensor)
    on_gpu = device().type == "cuda"
    memory = plan_memory(settings, feed.plan, config, utilization, parameters, on_gpu=on_gpu, available=available)
    if layout.is_first():
        lines = [f"{f'{title}:' if title else '':13} {text}" for title, text in list_facts(recipe, opened, parameters)]
        lines += describe_end_tokens(recipe.model.path, opened.reader.tokenizer)
        if memory is not None and recipe.model.gradient_checkpointing == "auto":
            lines.append(describe_recomputation(memory.settings))
        if memory is not None and recipe.method.name == "vcore" and recipe.data.probe_path is None:
            passes, shape = derive_needed_passes(settings, memory.settings), feed.plan.time_model.shape
            lines.append(start_screen.describe_cost(passes, shape, feed, recipe.probe.every))
        if not on_gpu and computes_in_fp32():
            lines.append("bf16 matrix multiplications are computed in fp32, as on CPUs without bf16 instructions")
        description = "\n".join([*lines, ""])
        console.say(description)
        console.note(description)
    if (warning := warn_of_repeats(feed.epoch(1))) is not None:
        console.warn(warning)
    for part, used in utilization.items():
        console.note(f"Balance of the {part} batch in the next steps: {used.describe()}")
        if used.is_low:
            console.warn(feed.plan.describe_warning(part))
    if memory is not None:
        console.note(describe_memory(memory))
    return memory


def list_facts(recipe: Recipe, opened: OpenedRun, counts: ParameterCounts | None) -> Iterator[tuple[str, str]]:
    """List titles and texts of the first lines on the screen. `counts`: of the model, or of a rank's shard of it; None
    if it cannot be read."""
    feed, num_done, schedule = opened.data.feed, opened.num_done, opened.schedule
    data, optimizer, num_steps = recipe.data, recipe.optimizer, schedule.num_steps
    experts, files = feed.plan.time_model.shape.experts, data.train_files()
    yield (
        "Model",
        start_screen.describe_model(recipe.model, recipe.lora, counts if recipe.parallel.tensor == 1 else None),
    )
    if experts is not None:
        yield "", f"{experts.per_token} of {experts.num_experts} experts for a token, no auxiliary loss"
    yield "Data", start_screen.describe_training(data, feed.dataset)
    if len(files) > 1:
        yield from (("", line) for line in start_screen.describe_files(files, feed.main_order, num_steps))
    if feed.probe_dataset is not feed.dataset and data.probe_path is not None:
        yield "Trusted data", start_screen.describe_data(data.probe_path, feed.probe_dataset)
    if held_out := opened.data.validation.items():
        yield "Held out", ", ".join(f"{name} {count(len(dataset), 'sequence')}".strip() for name, dataset in held_out)
    yield "Method", start_screen.describe_method(recipe.method, recipe.utility, recipe.probe, data.probe_path)
    yield "Parallelism", start_screen.describe_parallelism()
    yield "Batch", f"{feed.plan.describe()}; {start_screen.describe_accumulation(feed, num_done, num_steps)}"
    done = f", {num_done:,} of them done" if num_done else ""
    decay = f", decay from step {schedule.first_decay_step + 1:,}" if schedule.kind == "wsd" else ""
    epochs = count(float(f"{feed.epoch(num_steps):.3g}"), "epoch")
    rate = f"learning rate {optimizer.learning_rate:g} ({schedule.kind}{decay})"
    yield "Steps", f"{num_steps:,}{done} ({epochs}), {optimizer.name}, {rate}"
    yield "Output", f"{start_screen.shorten_path(recipe.run.output_dir)} (details in start.txt)"


def make_trainer(recipe: Recipe, opened: OpenedRun, engine: Engine, frozen_digest: str | None) -> Trainer:
    """Build everything that takes steps, load the checkpoint into it, and check it. A collective, which writes
    nothing."""
    method, probe, utility, feed = recipe.method, recipe.probe, recipe.utility, opened.data.feed
    passes = feed.plan.batches_per_utility_pass
    estimator = build_estimator(method, probe, utility, engine, batches_per_pass=passes)
    if opened.checkpoint is not None:
        mark("loading the checkpoint", is_loading=True)
        load_checkpoint(opened.checkpoint, engine, estimator, recipe.model.path, frozen_digest, probe.every)
    warn_of_non_finite(engine)
    check_start(engine, feed)
    check_derivatives(engine, estimator, feed)
    check_approximation(engine, estimator, feed, method, probe)
    return Trainer(engine, estimator, method, probe, opened.schedule, recipe.run.seed)


def begin_folder(
    recipe: Recipe,
    opened: OpenedRun,
    lock: RunLock,
    trainer: Trainer,
    frozen_digest: str | None,
    notes: Sequence[str],
) -> tuple[MetricsLog | None, RunState]:
    """Write the first files of the run's folder, and validate a new run; return the metrics log, on rank 0, and the
    state of the run. A collective."""
    folder = Path(recipe.run.output_dir)
    if opened.resumes:
        set_aside_newer(opened.checkpoints, opened.num_done)
        is_adapter = recipe.lora is not None
        moved = run_on_first_rank(
            lambda: run_folder.set_aside_result(folder, opened.newest_step, is_adapter=is_adapter)
        )
        for path in moved or []:
            console.say(f"The run had finished and goes on: its earlier result is {path}")
    else:  # not earlier: every check comes before the first file
        run_on_first_rank(lambda: lock_run_folder(recipe, lock, False))
    log = run_on_first_rank(lambda: open_log(recipe, opened, notes))
    if opened.checkpoint is None:
        before = validate(trainer, opened.data)
        if log is not None:
            log.track({"step": 0, **name_held_out(before)})
    else:
        before = opened.checkpoint[1].validation_losses_before
    if before:
        losses = ", ".join(f"{name} {loss:.4f}".strip() for name, loss in before.items())
        console.say(f"Held-out loss before training: {losses}")
        run_on_first_rank(lambda: run_folder.write_held_out_losses(folder, before, {}, recipe.method.normalization))
    return log, RunState(
        step=opened.num_done,
        world_size=layout.size("job"),
        num_updates=trainer.engine.num_updates,
        shapes=list_shapes(trainer.engine),
        direction=trainer.estimator.state(),
        data_digests=list_data_digests(opened.data.feed),
        validation_losses_before=before,
        frozen_digest=frozen_digest,
        held_out_loss=None,
        held_out_digest=make_digest(opened.data.validation),
    )


def open_log(recipe: Recipe, opened: OpenedRun, notes: Sequence[str]) -> MetricsLog:
    """Write recipe, environment and the notes on the start, and open the metrics log with its trackers. On rank 0."""
    folder, dataset = Path(recipe.run.output_dir), opened.data.feed.dataset
    kept, text = dataset.origin if isinstance(dataset, SubsetDataset) else None, "\n".join(notes)
    num_lost_lines = run_folder.begin(folder, dump_recipe(recipe), layout.size("job"), opened.num_done, kept, text)
    if num_lost_lines:
        console.say(f"{count(num_lost_lines, 'line')} of later steps moved to {folder / run_folder.LOST_METRICS}")
    if isinstance(dataset, SubsetDataset) and dataset.held_out is not None:
        files, rows = find_token_store(dataset).origins()
        run_folder.write_held_out_rows(folder, [(files[i], int(rows[i]) + 1) for i in dataset.held_out.tolist()])
    trackers = start_trackers(folder, recipe.track, flat_values(recipe), opened.num_done)
    with writing("run.output_dir", folder):
        if recipe.method.name == "custom" and recipe.method.function is not None:
            source = Path(recipe.method.function.rpartition(":")[0])
            with write_atomically(folder / source.name) as unfinished:
                unfinished.write_bytes(source.read_bytes())  # in any encoding that it declares
        return MetricsLog(folder, trackers)


def write_result(
    recipe: Recipe, run: Run, result: RunResult, tokenizer: PreTrainedTokenizerBase, base_digest: str | None
) -> None:
    """Write losses and trained weights into the run's folder. A collective. `base_digest`: `RunState.frozen_digest`."""
    mark("export")
    before, after = result.validation_losses_before, result.validation_losses_after
    if after:
        normalization = recipe.method.normalization
        run_on_first_rank(lambda: run_folder.write_held_out_losses(run.folder, before, after, normalization))
    kind: Kind = "model" if recipe.lora is None else "adapter"

    def make_card() -> str:
        model, data = recipe.model.path, recipe.data
        return make_model_card(run.folder, model, recipe.lora, recipe.method, data, kind, base_digest=base_digest)

    card = run_on_first_rank(make_card)
    save_hugging_face(run.trainer.engine, tokenizer, recipe.model.path, result.export_folder, card=card)
    if run.metrics_log is not None:
        run.metrics_log.close()


def summarize(result: RunResult) -> str:
    """Make the last lines of a run: held-out losses, and the result's folder."""
    before = result.validation_losses_before
    losses = [
        f"{name} {before[name]:.4f} -> {after:.4f}".strip()
        for name, after in result.validation_losses_after.items()
        if name in before  # data.validation_path may change when a run is resumed
    ]
    lines = [""]
    if losses:
        lines.append(f"Held-out loss: {', '.join(losses)}")
    lines.append(f"Result: {result.export_folder} (Hugging Face format)")
    return "\n".join(lines)
