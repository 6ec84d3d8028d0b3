"""A run from start to end: read the data, build the engine, train step by step, save the result."""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .checkpoints import Checkpoints
from .config import Recipe, deepspeed_config, dump_recipe, plan_batch
from .data import Dataset
from .engine import (
    Direction,
    Engine,
    NonFiniteGradient,
    Stops,
    build_optimizer,
    distributed,
    save_hugging_face,
    sharded_loading,
    watchdog,
)
from .errors import RunStopped
from .feed import Feed, build_feed, read_dataset, read_training_data
from .models import (
    TokenLossModel,
    add_lora,
    check_forward_mode,
    check_model_folder,
    load_causal_lm,
    load_tokenizer,
)
from .signals import stop_signals
from .step import NonFiniteLoss, StepBatches, train_step
from .track.console import Console, describe_token_weights
from .track.run_folder import LOST_METRICS, RunFolder, export_folder, goes_on
from .track.step_metrics import StepMetrics
from .track.wandb_log import WandbLog

RELIABLE_SIGNAL_TO_NOISE = 3.0
"""Below this, a finite difference orders tokens by rounding as much as by utility (Spearman under about 0.9)."""


CHECK_DIFFERENCE_EVERY = 100
"""Optimizer steps between two measurements of a finite difference's noise (and searches for `epsilon: auto`)."""


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
    with watchdog.watching(recipe.engine.lost_rank_seconds, recipe.engine.timeout_minutes):
        return train_together(recipe, folder, resumes)


def train_together(recipe: Recipe, folder: Path, resumes: bool) -> RunResult:
    """The run, with the process group up. A collective."""
    console = Console(enabled=distributed.rank() == 0)
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
        line = {"step": k + 1, "epoch": epoch, **metrics.values, **asdict(feed.waste([k])), **of_checkpoint}
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
