"""A run from start to end: read the data, build the engine, train step by step, save the result."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from .checkpoints import Checkpoints
from .config import Recipe, deepspeed_config, dump_recipe, plan_batch
from .engine import (
    Direction,
    Engine,
    build_optimizer,
    distributed,
    save_hugging_face,
    sharded_loading,
    watchdog,
)
from .errors import UserError
from .feed import build_feed, read_dataset, read_training_data
from .loop import describe_waste, run_steps, validate
from .models import (
    TokenLossModel,
    add_lora,
    check_forward_mode,
    check_model_folder,
    load_causal_lm,
    load_tokenizer,
)
from .signals import stop_signals
from .track.console import Console, describe_token_weights
from .track.run_folder import LOST_METRICS, RunFolder, export_folder, goes_on
from .track.run_lock import RunLock
from .track.step_metrics import StepMetrics
from .track.wandb_log import WandbLog


@dataclass(frozen=True)
class RunResult:
    folder: Path
    export_folder: Path
    validation_loss_before: float | None
    validation_loss_after: float | None
    last_step: StepMetrics | None
    """None where the run was resumed after its last step."""


def train(recipe: Recipe) -> RunResult:
    """Runs a recipe. Every rank of the job calls it.

    Raises:
        UserError: before anything is written, for whatever the user can mend.
        NonFiniteLoss, NonFiniteGradient: with step, rank and sequence ids; the parameters are those of the last good
        step.
        RunStopped: on all ranks alike, after a checkpoint.
    """
    folder = Path(recipe.run.output_dir)
    resumes = goes_on(recipe)
    check_model(recipe)
    distributed.start_process_group(recipe.engine.timeout_minutes)
    lock = RunLock(folder)
    try:
        with watchdog.watching(recipe.engine.lost_rank_seconds, recipe.engine.timeout_minutes):
            return train_together(recipe, folder, lock, resumes)
    finally:
        lock.release()


def train_together(recipe: Recipe, folder: Path, lock: RunLock, resumes: bool) -> RunResult:
    """The run, with the process group up. A collective."""
    console = Console(enabled=distributed.rank() == 0)

    def hold_folder() -> None:
        if distributed.rank() == 0:
            lock.acquire(console.say)
            if goes_on(recipe) != resumes:
                raise UserError(
                    f"run.output_dir: {folder}: another job has worked there since this one began; expected one job at "
                    "a time. The same command goes on with what is there"
                )

    if resumes:
        distributed.first_rank_first(hold_folder)
    plan = plan_batch(recipe, distributed.world_size())
    ds_config = deepspeed_config(recipe, plan)
    console.say(f"Batch: {plan.describe()}")
    checkpoints = Checkpoints(recipe, console)
    found = checkpoints.newest() if resumes else None
    if resumes and found is None:
        console.say(f"{folder} holds this run without a checkpoint: it begins at its first step")

    watchdog.mark("reading data")
    tokenizer = load_tokenizer(recipe.model.path)
    training = read_training_data(recipe, tokenizer, console)
    validation = None
    if recipe.data.validation_path is not None:
        validation = read_dataset(recipe, recipe.data.validation_path, tokenizer, console)
    probe = None
    if recipe.method.name == "vcore" and recipe.data.probe_path is not None:
        probe = read_dataset(recipe, recipe.data.probe_path, tokenizer, console)
    feed = build_feed(recipe, plan, training, tokenizer, probe)
    num_steps = count_steps(recipe, len(training))
    if found is not None:
        checkpoints.check_data(found, feed)

    watchdog.mark("loading the model")
    engine = build_engine(recipe, ds_config)
    direction = Direction(engine) if recipe.method.name == "vcore" else None
    console.say(describe_engine(recipe, engine, direction))

    num_done = 0
    if found is not None:
        watchdog.mark("loading the checkpoint")
        num_done = checkpoints.load(found, engine, direction)
    if resumes:
        checkpoints.clear_above(num_done)
    if not resumes:
        distributed.first_rank_first(
            hold_folder
        )  # not earlier: what the user has to mend is found before anything is written
    run_folder = RunFolder(folder, recipe, distributed.world_size(), num_done) if distributed.rank() == 0 else None
    if run_folder is not None and run_folder.num_lost_lines:
        console.say(f"{run_folder.num_lost_lines} line(s) of later steps moved to {folder / LOST_METRICS}")
    if run_folder is not None and recipe.run.wandb_project is not None:
        run_folder.wandb = WandbLog(recipe, console, checkpoints.wandb_run_id)
        checkpoints.wandb_run_id = run_folder.wandb.run_id
        console.say(f"Weights & Biases: {run_folder.wandb.url or 'offline'}")
    console.say(describe_waste(feed, num_done, num_steps))
    console.say(f"Run: {num_steps} steps, written to {folder}\n")
    if found is None:
        checkpoints.validation_loss_before = validate(engine, feed, validation)
    before = checkpoints.validation_loss_before
    if before is not None:
        console.say(f"held-out loss before training: {before:.4f}")
    with stop_signals.held_back():
        last_step = run_steps(
            recipe, engine, feed, direction, num_steps, run_folder, console, validation, checkpoints, num_done
        )
    # A signal from here on ends the process at once: the run goes on from its last checkpoint, which is of this point.
    after = validate(engine, feed, validation)

    watchdog.mark("export")
    save_hugging_face(engine, tokenizer, recipe.model.path, export_folder(recipe))
    if run_folder is not None:
        run_folder.close()
    result = RunResult(folder, export_folder(recipe), before, after, last_step)
    console.say(summarize(result, tokenizer))
    engine.close()
    return result


def check_model(recipe: Recipe) -> None:
    """Raises UserError where the model's folder cannot serve the recipe; cheap, no weights are read."""
    check_model_folder(recipe.model.path)
    if recipe.method.name == "vcore" and recipe.utility.estimator == "jvp":
        check_forward_mode(recipe.model.path)


def count_steps(recipe: Recipe, num_sequences: int) -> int:
    """Optimizer steps of the run; an epoch that ends within a step is rounded up to whole steps."""
    if recipe.schedule.num_steps is not None:
        return recipe.schedule.num_steps
    assert recipe.schedule.num_epochs is not None  # the recipe's rules
    return max(1, math.ceil(recipe.schedule.num_epochs * num_sequences / recipe.batch.global_size))


def build_engine(recipe: Recipe, ds_config: dict) -> Engine:
    """Model, adapters, optimizer and ZeRO-3, from the recipe. A collective."""
    # The same on every rank: adapters are initialised before they are sharded.
    torch.manual_seed(recipe.run.seed)
    with sharded_loading(ds_config):
        causal_lm = load_causal_lm(
            recipe.model.path,
            dtype=torch.bfloat16 if recipe.model.precision == "bf16" else torch.float32,
            attention=recipe.model.attention,
            gradient_checkpointing=recipe.model.gradient_checkpointing,
        )
    if recipe.lora is not None:
        causal_lm = add_lora(
            causal_lm,
            rank=recipe.lora.rank,
            alpha=recipe.lora.alpha,
            dropout=recipe.lora.dropout,
            target_modules=recipe.lora.target_modules,
        )
    model = TokenLossModel(causal_lm)
    model.train()
    engine = Engine(
        model,
        build_optimizer(model, recipe.optimizer),
        ds_config,
        coalesce_gradient_reduction=recipe.engine.coalesce_gradient_reduction,
    )
    # Different on every rank, so that dropout is independent between ranks.
    torch.manual_seed(recipe.run.seed + 1 + distributed.rank())
    return engine


def describe_engine(recipe: Recipe, engine: Engine, direction: Direction | None) -> str:
    num_all = sum(parameter.ds_numel for parameter in engine.module.parameters())
    num_trainable = sum(parameter.ds_numel for _, parameter in engine.trainable)
    kind = f"LoRA rank {recipe.lora.rank}" if recipe.lora is not None else "full-parameter"
    lines = [
        f"Model: {recipe.model.path}: {num_all:,} parameters, {num_trainable:,} trained ({kind}), "
        f"{recipe.model.precision}, ZeRO-3 over {distributed.world_size()} rank(s) on {engine.device.type}"
    ]
    if direction is None:
        return "\n".join([*lines, f"Method: {recipe.method.name}, normalization {recipe.method.normalization}"])
    strength = (
        f"kl_budget {recipe.method.kl_budget:g} nats"
        if recipe.method.kl_budget is not None
        else f"temperature {recipe.method.temperature:g}"
    )
    epsilon = f", epsilon {recipe.utility.epsilon}" if recipe.utility.epsilon is not None else ""
    lines.append(
        f"Method: vcore, {strength}, alpha {recipe.method.alpha}, utilities by {recipe.utility.estimator}{epsilon} "
        f"along the {recipe.probe.direction} direction, which keeps {direction.persistent_bytes / 2**20:.1f} MiB a rank"
    )
    if recipe.utility.estimator == "finite_difference" and engine.has_dropout:
        lines.append(
            "LoRA dropout is on, so the training forward cannot serve as l(theta): "
            "finite differences take one more forward a step"
        )
    return "\n".join(lines)


def summarize(result: RunResult, tokenizer: PreTrainedTokenizerBase) -> str:
    lines = []
    if result.validation_loss_before is not None and result.validation_loss_after is not None:
        lines.append(
            f"\nheld-out loss: {result.validation_loss_before:.4f} before, "
            f"{result.validation_loss_after:.4f} after training"
        )
    example = result.last_step.example if result.last_step is not None else None
    if example is not None and example.utilities is not None:
        lines.append("\n" + describe_token_weights(example, tokenizer))
    lines.append(f"\nResult: {result.export_folder} (Hugging Face format)\nMetrics: {result.folder / 'metrics.jsonl'}")
    return "\n".join(lines)


def describe_recipe(recipe: Recipe, num_ranks: int) -> str:
    """What `check` prints: the resolved recipe and the batch arithmetic.

    Raises UserError for impossible arithmetic, a contradiction with the DeepSpeed JSON, or a used output folder.
    """
    plan = plan_batch(recipe, num_ranks)
    deepspeed_config(recipe, plan)
    goes_on(recipe)
    return f"{dump_recipe(recipe).rstrip()}\n\nBatch: {plan.describe()}"
