"""Rules of a recipe that look at more than one key: one `if`, one sentence with the values each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vcore_ds.config.schema import Recipe


@dataclass(frozen=True)
class BrokenRule:
    """A rule that a recipe breaks."""

    keys: tuple[str, ...]
    """Every dotted key the rule reads; the first one is named in the message."""
    found: str
    expected: str


def broken_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    """Yields every broken rule. Reads no key without a default, so that it also works on a half-valid recipe."""
    yield from _method_rules(recipe)
    yield from _alpha_rules(recipe)
    yield from _scope_rules(recipe)
    yield from _packing_rules(recipe)
    yield from _probe_rules(recipe)
    yield from _reference_rules(recipe)
    yield from _keep_rules(recipe)
    yield from _training_rules(recipe)
    yield from _provider_rules(recipe)


def _method_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    method, utility = recipe.method, recipe.utility
    tilt = {"temperature": method.temperature, "kl_budget": method.kl_budget}
    given = {key: value for key, value in tilt.items() if value is not None}
    if method.uses_utilities and len(given) != 1:
        yield BrokenRule(
            ("method.kl_budget", "method.temperature", "method.name"),
            " and ".join(f"{key} {value}" for key, value in given.items()) or "neither temperature nor kl_budget",
            "exactly one of method.temperature and method.kl_budget with method.name vcore; "
            + ("set the other to null" if given else "start from method.kl_budget: 0.005"),
        )
    if not method.uses_utilities:
        for key, value in given.items():
            yield BrokenRule(
                (f"method.{key}", "method.name"),
                f"{value} together with method.name {method.name}",
                f"null: only vcore weights tokens by utility (set method.{key} to null, or method.name to vcore)",
            )
    if utility.estimator == "finite_difference" and utility.epsilon is None:
        yield BrokenRule(
            ("utility.epsilon", "utility.estimator"),
            "null together with utility.estimator finite_difference",
            "the step of the finite difference: auto, or a number such as 1.0e-4 (the paper's; in bf16 it measures "
            "rounding, prefer utility.estimator jvp)",
        )
    if utility.estimator == "jvp" and utility.epsilon is not None:
        yield BrokenRule(
            ("utility.epsilon", "utility.estimator"),
            f"{utility.epsilon} together with utility.estimator jvp",
            "null: jvp is exact and has no step (or set utility.estimator to finite_difference)",
        )
    if utility.fused is True and utility.estimator == "finite_difference":
        yield BrokenRule(
            ("utility.fused", "utility.estimator"),
            "true together with utility.estimator finite_difference",
            "auto: a finite difference has its l(theta) from the main forward already, and its second forward needs "
            "other weights (or set utility.estimator to jvp)",
        )
    if utility.rounding == "stochastic" and utility.estimator == "jvp":
        yield BrokenRule(
            ("utility.rounding", "utility.estimator"),
            "stochastic together with utility.estimator jvp",
            "nearest: jvp perturbs nothing, so nothing is rounded (or set utility.estimator to finite_difference)",
        )


def _alpha_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    method, batch = recipe.method, recipe.batch
    if not method.uses_utilities:
        return
    if method.alpha_scope == "micro_batch" and method.alpha in ("effective_sample_size", "none"):
        yield BrokenRule(
            ("method.alpha_scope", "method.alpha"),
            f"micro_batch together with method.alpha {method.alpha}",
            "global_batch: this alpha does not depend on what a sequence is batched with "
            "(or set method.alpha to loss_ratio)",
        )
    size, key = batch.global_size, "batch.global_size"
    if method.alpha_scope == "micro_batch" and batch.packed_row_tokens is None:
        micro, key = batch.micro_batch_size_per_rank, "batch.micro_batch_size_per_rank"
        size = 1 if micro == "auto" else micro
    if method.alpha == "variance" and size == 1:
        yield BrokenRule(
            ("method.alpha", "method.alpha_scope", key),
            f"variance together with {key} 1",
            "loss_ratio: one sequence has no variance "
            f"(or set {'method.alpha_scope to global_batch' if 'micro' in key else key + ' to at least 2'})",
        )


def _scope_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    method = recipe.method
    if not method.uses_utilities:
        return
    is_batch_wide = method.scope == "sequence_and_batch"
    if is_batch_wide != (method.batch_kl_budget is not None):
        yield BrokenRule(
            ("method.batch_kl_budget", "method.scope"),
            f"{'null' if is_batch_wide else method.batch_kl_budget} together with method.scope {method.scope}",
            "the budget of the sequence weights in nats, such as 0.1"
            if is_batch_wide
            else "null, or method.scope sequence_and_batch",
        )
    if is_batch_wide and method.alpha_scope == "micro_batch":
        yield BrokenRule(
            ("method.alpha_scope", "method.scope"),
            "micro_batch together with method.scope sequence_and_batch",
            "global_batch: sequences of the whole batch share one budget",
        )
    if is_batch_wide and recipe.batch.global_size == 1:
        yield BrokenRule(
            ("batch.global_size", "method.scope"),
            "1 together with method.scope sequence_and_batch",
            "at least 2 sequences, between which the weight is divided (or set method.scope to sequence)",
        )


def _packing_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    tokens = recipe.batch.packed_row_tokens
    if tokens is None:
        measured = recipe.utility.micro_batch_size_per_rank
        if measured is not None and recipe.batch.micro_batch_size_per_rank == "auto":
            yield BrokenRule(
                ("utility.micro_batch_size_per_rank", "batch.micro_batch_size_per_rank"),
                f"{measured} together with batch.micro_batch_size_per_rank auto",
                "null, or a number in both: a gradient-free forward holds whole micro-batches of the main batch",
            )
        return
    sizes = {
        "batch": recipe.batch.micro_batch_size_per_rank,
        "probe": recipe.probe.micro_batch_size_per_rank,
        "utility": recipe.utility.micro_batch_size_per_rank,
    }
    for section, size in sizes.items():
        if size not in (None, 1, "auto"):
            yield BrokenRule(
                (f"{section}.micro_batch_size_per_rank", "batch.packed_row_tokens"),
                f"{size} together with batch.packed_row_tokens {tokens}",
                "1: a micro-batch is one packed row, and packed_row_tokens says how much it holds",
            )


def _probe_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    data = recipe.data
    if recipe.method.uses_utilities and recipe.probe.direction == "adam" and recipe.optimizer.name != "adamw":
        yield BrokenRule(
            ("probe.direction", "optimizer.name", "method.name"),
            f"adam together with optimizer.name {recipe.optimizer.name}",
            "sgd: the direction is the update of the optimizer that trains (or set optimizer.name to adamw)",
        )
    if recipe.probe.rank is not None and recipe.method.uses_utilities:
        if recipe.utility.estimator == "finite_difference":
            yield BrokenRule(
                ("probe.rank", "utility.estimator"),
                f"{recipe.probe.rank} together with utility.estimator finite_difference",
                "null: a perturbation gathers no direction, and a low rank saves nothing (or set "
                "utility.estimator to jvp)",
            )
        if recipe.lora is not None:
            yield BrokenRule(
                ("probe.rank", "lora"),
                f"{recipe.probe.rank} together with lora",
                "null: adapters are matrices of low rank already",
            )
    if recipe.probe.batch_size == "all" and data.probe_path is None:
        yield BrokenRule(
            ("probe.batch_size", "data.probe_path"),
            "all without data.probe_path",
            "a number: without a pool of its own the probe is drawn from the training data (or set data.probe_path)",
        )
    if data.trusted_share > 0:
        yield from _trusted_share_rules(recipe)


def _trusted_share_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    data, size = recipe.data, recipe.batch.global_size
    if data.probe_path is None:
        yield BrokenRule(
            ("data.trusted_share", "data.probe_path"),
            f"{data.trusted_share} without data.probe_path",
            "0, or the trusted conversations in data.probe_path",
        )
    if not 0 < round(data.trusted_share * size) < size:
        yield BrokenRule(
            ("data.trusted_share", "batch.global_size"),
            f"{data.trusted_share} together with batch.global_size {size}, which is "
            f"{round(data.trusted_share * size)} trusted sequence(s)",
            f"between 1 and {size - 1} of them" if size > 1 else "batch.global_size 2 or more",
        )
    if recipe.method.drops_tokens or recipe.method.reads_reference:
        yield BrokenRule(
            ("data.trusted_share", "method.name"),
            f"{data.trusted_share} together with method.name {recipe.method.name}",
            "0: that method needs to know of each sequence what is only known of the training data",
        )


def _reference_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    keys = ("data.reference_log_probabilities", "method.name", "lora")
    file, method = recipe.data.reference_log_probabilities, recipe.method
    if method.reads_reference and recipe.lora is None and file is None:
        yield BrokenRule(
            keys,
            "null together with method.name iw_sft and lora null",
            "the file that `vcore-ds reference RECIPE --output FILE` makes before training (with all parameters "
            "trained the reference model is gone after the first step; with lora it is the model without adapters)",
        )
    if file is not None and not (method.reads_reference and recipe.lora is None):
        adapters = "lora, whose reference is the model without adapters"
        why = adapters if method.reads_reference else f"method.name {method.name}"
        yield BrokenRule(
            keys, f"{file} together with {why}", "null: only iw_sft with lora null reads reference log-probabilities"
        )


def _keep_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    keep = recipe.data.keep
    if keep is None:
        return
    if (keep.top is None) == (keep.above is None):
        found = "neither top nor above" if keep.top is None else f"top {keep.top:g} and above {keep.above:g}"
        yield BrokenRule(
            ("data.keep.top", "data.keep.above"),
            found,
            "exactly one of data.keep.top (share of the traces) and data.keep.above (utility); set the other to null",
        )
    elif keep.above is not None and keep.within == "source":
        yield BrokenRule(
            ("data.keep.within", "data.keep.above"),
            f"source together with data.keep.above {keep.above:g}",
            "all: a threshold keeps the same traces either way (or give data.keep.top)",
        )


def _training_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    model, data = recipe.model, recipe.data
    optimizer, schedule, run = recipe.optimizer, recipe.schedule, recipe.run
    if model.attention == "flash_attention_2" and model.precision == "fp32":
        yield BrokenRule(
            ("model.attention", "model.precision"),
            "flash_attention_2 together with model.precision fp32",
            "auto, sdpa or eager: flash_attention_2 computes in 16 bits only",
        )
    if model.activation_offload and not model.gradient_checkpointing:
        yield BrokenRule(
            ("model.activation_offload", "model.gradient_checkpointing"),
            "true together with model.gradient_checkpointing false",
            "false: without checkpoints every activation would be copied to the host and back (or set "
            "model.gradient_checkpointing to true)",
        )
    if optimizer.name == "sgd":
        for key in sorted({"betas", "eps"} & optimizer.model_fields_set):
            yield BrokenRule(
                (f"optimizer.{key}", "optimizer.name"),
                f"{getattr(optimizer, key)} together with optimizer.name sgd",
                "no such key: it belongs to adamw (remove it)",
            )
    if (schedule.num_steps is None) == (schedule.num_epochs is None):
        found = (
            "neither num_steps nor num_epochs"
            if schedule.num_steps is None
            else f"num_steps {schedule.num_steps} and num_epochs {schedule.num_epochs}"
        )
        yield BrokenRule(
            ("schedule.num_steps", "schedule.num_epochs"),
            found,
            "exactly one of schedule.num_steps (optimizer steps) and schedule.num_epochs (passes over the data); "
            "set the other to null",
        )
    if run.validate_every is not None and data.validation_path is None:
        yield BrokenRule(
            ("run.validate_every", "data.validation_path"),
            f"{run.validate_every} without data.validation_path",
            "null, or held-out conversations in data.validation_path",
        )


def _provider_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    model, tensor, expert = recipe.model, recipe.parallel.tensor, recipe.parallel.expert
    if expert > 1 and model.provider == "megatron":
        yield BrokenRule(
            ("parallel.expert", "model.provider"),
            f"{expert} together with model.provider megatron",
            "1: megatron-core's layers are those of dense models (or set model.provider to huggingface)",
        )
    if expert > 1 and recipe.lora is not None and "experts" in recipe.lora.target_modules:
        yield BrokenRule(
            ("parallel.expert", "lora.target_modules"),
            f"{expert} together with experts in lora.target_modules",
            "1: adapters on experts are whole on every rank (or leave experts out of lora.target_modules)",
        )
    if model.provider == "huggingface":
        if tensor > 1:
            yield BrokenRule(
                ("parallel.tensor", "model.provider"),
                f"{tensor} together with model.provider huggingface",
                "1: Hugging Face's layers are whole on every rank (or set model.provider to megatron)",
            )
        return
    if model.attention != "auto":
        yield BrokenRule(
            ("model.attention", "model.provider"),
            f"{model.attention} together with model.provider megatron",
            "auto: these are kernels of Hugging Face's layers",
        )
