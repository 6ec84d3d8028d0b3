"""A run from start to end: lock and resume, data, engine, train, result."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import RunLock
from vcore_ds.common.paths import writing
from vcore_ds.common.text import count
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.resume import flat_values
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import WRITTEN_BY_COMMANDS
from vcore_ds.data.cache import check_source
from vcore_ds.data.dataset import Dataset, KeptDataset
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.cpu_matmul import describe_cpu_matmul
from vcore_ds.distributed.device import device
from vcore_ds.distributed.process_group import run_first_rank_first, run_on_first_rank
from vcore_ds.distributed.signals import stop_signals
from vcore_ds.distributed.watchdog import mark, watching
from vcore_ds.engine.export_shards import save_hugging_face
from vcore_ds.models.architecture_check import check_model, count_parameters
from vcore_ds.models.end_tokens import describe_end_tokens
from vcore_ds.planning.batch_plan import BatchPlan
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.fit import plan_memory
from vcore_ds.planning.passes import ParameterCounts, derive_needed_passes
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training import run_folder, start_screen
from vcore_ds.training.checkpoints import Checkpoints, check_compared, make_digest, say_best
from vcore_ds.training.console import Console, describe_example
from vcore_ds.training.extension import begin_branch, find_common_checkpoint
from vcore_ds.training.faults import warn_of_non_finite
from vcore_ds.training.feed import DataReader, Feed, build_feed, count_data
from vcore_ds.training.followed import choose_followed
from vcore_ds.training.loop import Run, RunData, RunLog, Trainer, build_throughput, run_steps, validate
from vcore_ds.training.metrics_log import BackgroundSink, MetricsLog
from vcore_ds.training.model_card import Kind, make_model_card
from vcore_ds.training.profile import check_profile
from vcore_ds.training.rehearsal import rehearse_result
from vcore_ds.training.run_folder import can_resume
from vcore_ds.training.schedule import Schedule, derive_schedule
from vcore_ds.training.setup import build_engine, build_estimator, plan_ranks, start_ranks
from vcore_ds.training.start_checks import check_approximation, check_derivatives, check_memory, check_start
from vcore_ds.training.step_metrics import StepMetrics
from vcore_ds.training.trackers import FINISH_SECONDS, WandbLog, start_trackers


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    folder: Path
    export_folder: Path
    validation_losses_before: dict[str, float]  # nats, by name of the held-out set
    validation_losses_after: dict[str, float]
    last_step: StepMetrics | None  # None if the run was resumed after its last step


def train(recipe: Recipe, *, advice_if_long: str = "", says_next: bool = True) -> RunResult:
    """Run a recipe. A collective. `advice_if_long`: how to make the run shorter, printed after the first step of a long
    run; `says_next`: print the command for the run's report at the end.
    Raises UserError for mistakes of the user, before anything is written; NonFiniteLoss, NonFiniteGradient with step,
    rank and sequence ids, without an update; RunStopped on all ranks alike, after a checkpoint."""
    resumes = can_resume(recipe)
    for key, path in recipe.data.paths().items():
        if key not in WRITTEN_BY_COMMANDS:
            check_source(path)  # before the model, whose lookup on the hub takes a minute without a connection
    check_model(derive_plan_settings(recipe))
    start_ranks(recipe.engine, recipe.parallel)
    lock = RunLock(Path(recipe.run.output_dir))
    try:
        with watching(recipe.engine.lost_rank_seconds, recipe.engine.timeout_minutes):
            result = train_together(recipe, lock, resumes, advice_if_long)
            if says_next and layout.is_first():
                print(f"Next: vcore-ds report {shlex.quote(str(result.folder))}", flush=True)
            return result
    finally:
        lock.release()


def train_together(recipe: Recipe, lock: RunLock, resumes: bool, advice_if_long: str) -> RunResult:
    """Run a recipe in the process group. A collective. `resumes`: whether this rank sees a run to resume."""
    # Rank 0 decides: if nodes do not share the folder, ranks could enter different collectives.
    resumes = layout.gather_objects("job", resumes)[0]
    console = Console(enabled=layout.is_first())
    settings, folder = derive_plan_settings(recipe), Path(recipe.run.output_dir)
    method, probe, utility = recipe.method, recipe.probe, recipe.utility
    plan = plan_ranks(settings)
    ds_config = deepspeed_config(settings, plan)
    run_on_first_rank(lambda: run_folder.check_output_folder(folder))

    checkpoints = Checkpoints(recipe, console)
    checkpoint = None
    if resumes:
        run_first_rank_first(lambda: lock_run_folder(recipe, lock, True, console))
    elif recipe.checkpoint.branch_from is not None:
        run_on_first_rank(lambda: start_branch(recipe, lock, console))
        resumes = True
    if resumes:
        checkpoint = checkpoints.find_newest()
        if checkpoint is None:
            console.say(f"{recipe.run.output_dir} holds this run without a checkpoint: it begins at its first step")

    mark("reading data", is_loading=True)
    reader = DataReader(recipe.data, recipe.model.path, load_tokenizer(recipe.model.path), console)
    feed, validation = read_data(recipe, plan, reader)
    schedule = derive_schedule(
        recipe.schedule, recipe.optimizer.learning_rate, len(feed.dataset), feed.main_order.batch_size
    )
    num_steps = schedule.num_steps
    check_profile(recipe.run.profile, num_steps)
    check_compared(recipe, num_steps)
    checkpoints.held_out_digest = make_digest(validation)
    if schedule.kind == "wsd":
        checkpoints.branch_step = schedule.first_decay_step
    newest_step = 0 if checkpoint is None else checkpoint[1].step
    if checkpoint is not None:
        checkpoints.check_data(checkpoint, feed)
        checkpoint = find_common_checkpoint(checkpoints, checkpoint, schedule, feed, console)

    num_done = checkpoint[1].step if checkpoint is not None else 0
    utilization = feed.utilization(num_done, num_steps)
    parameters = count_parameters(recipe.model.path, recipe.lora, recipe.parallel.tensor)
    memory = plan_memory(settings, plan, ds_config, utilization, parameters, on_gpu=device().type == "cuda")
    if console.enabled:
        lines = [describe_run(recipe, feed, validation, parameters, num_done, schedule)]
        lines += describe_end_tokens(recipe.model.path, reader.tokenizer)
        if device().type == "cpu" and (sentence := describe_cpu_matmul()) is not None:
            lines.append(sentence)
        console.say("\n".join([*lines, ""]))
        console.notes.insert(0, "\n".join([*lines, ""]))  # first in start.txt too
    for part, used in utilization.items():
        if used.is_low:
            console.warn(plan.describe_warning(part))
    for line in start_screen.describe_use_of_ranks(plan, utilization, memory):
        console.note(line)
    check_memory(memory, recipe.engine, console)

    run_on_first_rank(lambda: rehearse_result(recipe, reader.tokenizer))
    mark("loading the model", is_loading=True)
    engine = build_engine(settings, ds_config)
    # Computed now: the weights on disk may change before the first save.
    run_on_first_rank(lambda: checkpoints.frozen_digest)
    estimator = build_estimator(method, probe, utility, engine, batches_per_pass=plan.batches_per_utility_pass)
    for line in start_screen.describe_engine(recipe.engine, method, utility, engine, estimator.direction):
        console.note(line)
    if checkpoint is not None:
        mark("loading the checkpoint", is_loading=True)
        num_done = checkpoints.load(checkpoint, engine, estimator)
    non_finite = warn_of_non_finite(engine, console)
    check_start(engine, feed, console)
    check_derivatives(engine, estimator, feed, console)
    check_approximation(engine, estimator, feed, method, probe, console)

    if resumes:
        checkpoints.set_aside_newer(num_done)
        run_on_first_rank(lambda: set_aside_result(recipe, newest_step, console))
    else:  # not earlier: every check comes before the first file
        run_first_rank_first(lambda: lock_run_folder(recipe, lock, resumes, console))
    log = run_on_first_rank(lambda: begin_folder(recipe, feed, num_done, checkpoints, console))
    counts = count_data(recipe.data, feed, validation)
    run_on_first_rank(lambda: run_folder.write_json(folder / run_folder.DATA, counts))
    passes = None if memory is None else derive_needed_passes(settings, memory.settings)
    run = Run(
        recipe.run,
        Trainer(engine, estimator, method, probe, schedule, recipe.run.seed),
        RunData(feed, validation, choose_followed(recipe.run, recipe.data, recipe.method, feed, validation)),
        checkpoints,
        RunLog(console, log, build_throughput(recipe.model.path, passes), advice_if_long),
        non_finite,
    )

    last_step = run_training(run, num_done, is_new=checkpoint is None)
    result = write_result(recipe, run, reader.tokenizer, last_step)
    console.say(summarize(result, reader.tokenizer))
    if console.enabled:
        say_best(checkpoints, num_steps, console)
    engine.close()
    return result


def lock_run_folder(recipe: Recipe, lock: RunLock, resumes: bool, console: Console) -> None:
    """Lock the run's folder for this job, on rank 0. Raises UserError if another job holds it, or has worked in it
    since this job started."""
    if not layout.is_first():
        return
    lock.acquire(console.say)
    if can_resume(recipe) != resumes:
        raise UserError(
            f"run.output_dir: {recipe.run.output_dir}: another job has worked there since this one began; expected one "
            "job at a time. The same command resumes what is there"
        )


def start_branch(recipe: Recipe, lock: RunLock, console: Console) -> None:
    """Lock the run's folder and fill it from the checkpoint of the branch, on rank 0."""
    lock.acquire(console.say)
    console.say(f"This run begins from {recipe.checkpoint.branch_from}")
    begin_branch(recipe)


def set_aside_result(recipe: Recipe, num_steps: int, console: Console) -> None:
    """Rename the result of a finished run that is extended, on rank 0."""
    folder = Path(recipe.run.output_dir)
    for path in run_folder.set_aside_result(folder, num_steps, is_adapter=recipe.lora is not None):
        console.say(f"The run had finished and goes on: its result after step {num_steps} is {path}")


def read_data(recipe: Recipe, plan: BatchPlan, reader: DataReader) -> tuple[Feed, dict[str, Dataset]]:
    """Read the data: the batches of every step, and the held-out sequences by name of their set. A collective."""
    data, seed = recipe.data, recipe.run.seed
    training = reader.read_training_data(recipe.method, seed)
    validation: dict[str, Dataset] = {name: reader.read_store(path) for name, path in data.validation_paths().items()}
    probe = None
    if data.probe_path is not None and (recipe.method.uses_utilities or data.trusted_share > 0):
        probe = reader.read_store(data.probe_path)
    feed = build_feed(recipe.method, recipe.probe, plan, training, reader.pad_token_id, seed=seed, probe_dataset=probe)
    return feed, validation


def describe_run(
    recipe: Recipe,
    feed: Feed,
    validation: dict[str, Dataset],
    counts: ParameterCounts | None,
    num_done: int,
    schedule: Schedule,
) -> str:
    """Describe the run in the first lines on the screen. `counts`: of the model, or of a rank's shard of it; None if it
    cannot be read. `num_done`: steps that a resumed run has taken."""
    data, optimizer, positions = recipe.data, recipe.optimizer, feed.plan.time_model.shape.max_positions
    num_steps, kind = schedule.num_steps, str(schedule.kind)
    counts_of_model = counts if recipe.parallel.tensor == 1 else None
    lines = [f"Model:        {start_screen.describe_model(recipe.model, recipe.lora, counts_of_model)}"]
    if (experts := feed.plan.time_model.shape.experts) is not None:
        lines.append(
            f"Mixture:      {experts.per_token} of {experts.num_experts} experts for a token; no auxiliary loss of the "
            "router, and biases that balance experts stay as they are"
        )
    lines.append(f"Data:         {start_screen.describe_training(data, feed.dataset, positions)}")
    lines.append(
        f"              {start_screen.name_show_command(data, recipe.model.path)} prints rows as they are learned"
    )
    if len(files := data.train_files()) > 1:
        lines += [f"              {line}" for line in start_screen.describe_files(files, feed.main_order, num_steps)]
    if feed.probe_dataset is not feed.dataset and data.probe_path is not None:
        lines.append(f"Trusted data: {start_screen.describe_data(data.probe_path, feed.probe_dataset, positions)}")
    if validation:
        sets = ", ".join(f"{name} {count(len(dataset), 'sequence')}".strip() for name, dataset in validation.items())
        lines.append(f"Held out:     {sets}")
    left = f", {num_done:,} of them done" if num_done else ""
    if kind == "wsd":
        kind += f", decay from step {schedule.first_decay_step + 1:,}"
    epochs = count(float(f"{feed.epoch(num_steps):.3g}"), "epoch")
    lines += [
        f"Method:       {start_screen.describe_method(recipe.method, recipe.utility, recipe.probe, data.probe_path)}",
        f"Parallelism:  {start_screen.describe_parallelism()}",
        f"Batch:        {feed.plan.describe()}; {start_screen.describe_accumulation(feed, num_done, num_steps)}",
        f"Steps:        {num_steps:,}{left} ({epochs}), {optimizer.name}, learning rate {optimizer.learning_rate:g} "
        f"({kind})",
        f"Output:       {start_screen.shorten_path(recipe.run.output_dir)} (details in start.txt)",
    ]
    return "\n".join(lines)


def begin_folder(recipe: Recipe, feed: Feed, num_done: int, checkpoints: Checkpoints, console: Console) -> MetricsLog:
    """Write recipe and environment into the run's folder, and open the metrics log with its sinks. On rank 0."""
    folder = Path(recipe.run.output_dir)
    kept = feed.dataset.origin if isinstance(feed.dataset, KeptDataset) else None
    num_lost_lines = run_folder.begin(folder, dump_recipe(recipe), layout.size("job"), num_done, kept)
    run_folder.add_start(folder, num_done, "\n".join(console.notes))
    if num_lost_lines:
        console.say(f"{count(num_lost_lines, 'line')} of later steps moved to {folder / run_folder.LOST_METRICS}")
    sinks = []
    if "wandb" in recipe.track.trackers:
        values = recipe.model_dump(mode="json")
        wandb = WandbLog(folder, recipe.track, values, console, checkpoints.wandb_run_id)
        checkpoints.wandb_run_id = wandb.run_id
        console.say(f"Weights & Biases: {wandb.url or 'offline'}")
        sinks.append(BackgroundSink("Weights & Biases", lambda: wandb, console, close_seconds=FINISH_SECONDS + 10))
    sinks += start_trackers(folder, recipe.track, flat_values(recipe), num_done, console)
    with writing("run.output_dir", folder):
        return MetricsLog(folder, console, sinks)


def run_training(run: Run, num_done: int, is_new: bool) -> StepMetrics | None:
    """Take the remaining steps, after validating a new run. A collective."""
    console, checkpoints = run.log.console, run.checkpoints
    if is_new:
        checkpoints.validation_losses_before = validate(run.trainer, run.data, console)
    if before := checkpoints.validation_losses_before:
        losses = ", ".join(f"{name} {loss:.4f}".strip() for name, loss in before.items())
        console.say(f"Held-out loss before training: {losses}")
    # After the steps a signal ends the process at once: the last checkpoint holds the final state.
    with stop_signals.deferred():
        try:
            return run_steps(run, num_done)
        except Exception:
            # Even if this rank fails alone: the background threads of the others continue while their main threads
            # wait for it, and the watchdog finds dead ranks.
            checkpoints.finish_after_failure()
            raise


def write_result(
    recipe: Recipe, run: Run, tokenizer: PreTrainedTokenizerBase, last_step: StepMetrics | None
) -> RunResult:
    """Validate, and write losses and trained weights into the run's folder. A collective."""
    before = run.checkpoints.validation_losses_before
    after = run.checkpoints.validation_losses_after
    if after is None:
        after = validate(run.trainer, run.data, run.log.console)
    mark("export")
    if after:
        losses = {"normalization": recipe.method.normalization, "before": before, "after": after}
        run_on_first_rank(lambda: run_folder.write_json(run.folder / run_folder.HELD_OUT, losses))
    folder = run_folder.export_folder(run.folder, is_adapter=recipe.lora is not None)
    kind: Kind = "adapter" if recipe.lora is not None else "model"
    card = run_on_first_rank(lambda: make_model_card(run.folder, recipe, kind))
    save_hugging_face(run.trainer.engine, tokenizer, recipe.model.path, folder, card=card)
    if run.log.metrics is not None:
        run.log.metrics.close()
    return RunResult(run.folder, folder, before, after, last_step)


def summarize(result: RunResult, tokenizer: PreTrainedTokenizerBase) -> str:
    """Make the last lines of a run: tokens of one trace, held-out losses, and the result's folder."""
    before = result.validation_losses_before
    losses = [
        f"{name} {before[name]:.4f} -> {after:.4f}".strip()
        for name, after in result.validation_losses_after.items()
        if name in before  # data.validation_path may change when a run is resumed
    ]
    lines = [""]
    traces = result.last_step.tokens if result.last_step is not None else None
    if traces and traces[0].utilities is not None:
        lines.append(describe_example(traces[0], tokenizer) + "\n")
    if losses:
        lines.append(f"Held-out loss: {', '.join(losses)}")
    lines.append(f"Result: {result.export_folder} (Hugging Face format)")
    return "\n".join(lines)
