"""The recipe: its sections, and the rules over several keys."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Self

from pydantic import Field, model_validator

from vcore_ds.common.text import count
from vcore_ds.config import sections
from vcore_ds.config.data_section import DataConfig, KeepConfig


class Recipe(sections.Section):
    """A complete description of a run: the same recipe and data give the same run."""

    method: sections.MethodConfig = Field(default_factory=sections.MethodConfig)
    utility: sections.UtilityConfig = Field(default_factory=sections.UtilityConfig)
    probe: sections.ProbeConfig = Field(default_factory=sections.ProbeConfig)
    model: sections.ModelConfig
    parallel: sections.ParallelConfig = Field(default_factory=sections.ParallelConfig)
    lora: sections.LoraConfig | None = None
    data: DataConfig
    batch: sections.BatchConfig = Field(default_factory=sections.BatchConfig)
    optimizer: sections.OptimizerConfig
    schedule: sections.ScheduleConfig
    run: sections.RunConfig
    track: sections.TrackConfig = Field(default_factory=sections.TrackConfig)
    checkpoint: sections.CheckpointConfig = Field(default_factory=sections.CheckpointConfig)
    engine: sections.EngineConfig

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [f"{rule.keys[0]}: {rule.describe(self)}" for rule in broken_rules(self)]
        if broken:
            raise ValueError("\n".join(broken))
        return self


SECTIONS: dict[str, type[sections.Section]] = {**Recipe.__annotations__, "lora": sections.LoraConfig}
"""Section name -> class, in the order of the schema."""

SUBSECTIONS: dict[tuple[str, str], type[sections.Section]] = {
    ("data", "keep"): KeepConfig,
    ("run", "profile"): sections.ProfileConfig,
}
"""(section, key) -> class of the nested section; its value may be null."""


FOREIGN_KEYS = {"adamw": ("momentum",), "sgd": ("betas", "eps", "momentum"), "muon": ()}
"""optimizer.name -> keys of that section which only other optimizers have."""


def section_class(*names: str) -> type[sections.Section]:
    """The class of a section (`data`) or nested section (`data`, `keep`)."""
    return SUBSECTIONS[names[0], names[1]] if len(names) == 2 else SECTIONS[names[0]]


@dataclass(frozen=True)
class BrokenRule:
    """A rule over several keys that a recipe breaks."""

    keys: tuple[str, ...]
    """The dotted keys of the rule; the message names the first."""
    expected: str
    found: str = ""
    """The value found; empty for the values of the keys."""

    def describe(self, recipe: Recipe) -> str:
        """`found ...; expected ...`."""
        value, *others = [_value(recipe, key) for key in self.keys]
        named = " and ".join(f"{key} {other}" for key, other in zip(self.keys[1:], others, strict=True))
        return f"found {self.found or f'{value} together with {named}'}; expected {self.expected}"


def _value(recipe: Recipe, key: str) -> str:
    """The value of a dotted key, as in YAML."""
    value = attrgetter(key)(recipe)
    if isinstance(value, sections.Section):
        return "not null"
    return value if isinstance(value, str) else json.dumps(value)


def broken_rules(recipe: Recipe) -> Iterator[BrokenRule]:
    """Yield every broken rule. Reads only keys with a default, so that it also works on a partly valid recipe."""
    yield from _method_rules(recipe)
    if recipe.method.uses_utilities:
        yield from _vcore_rules(recipe)
    yield from _utility_rules(recipe)
    yield from _batch_rules(recipe)
    yield from _data_rules(recipe)
    yield from _model_rules(recipe)
    yield from _training_rules(recipe)
    yield from _checkpoint_rules(recipe)


def _method_rules(recipe: Recipe) -> Iterator[BrokenRule]:
    method = recipe.method
    tilt = {"temperature": method.temperature, "kl_budget": method.kl_budget}
    given = {key: value for key, value in tilt.items() if value is not None}
    if method.uses_utilities and len(given) != 1:
        yield BrokenRule(
            ("method.kl_budget", "method.temperature", "method.name"),
            "exactly one of method.temperature and method.kl_budget with method.name vcore; "
            + ("set the other to null" if given else "start from method.kl_budget: 0.005"),
            " and ".join(f"{key} {value}" for key, value in given.items()) or "neither temperature nor kl_budget",
        )
    if not method.uses_utilities:
        for key in given:
            yield BrokenRule(
                (f"method.{key}", "method.name"),
                f"null: only vcore weights tokens by utility (set method.{key} to null, or method.name to vcore)",
            )

    if method.is_anchored and recipe.lora is None:
        yield BrokenRule(
            ("lora", "method.name"),
            "LoRA adapters, without which the model is asft's base model (set lora.rank, or method.name to dft)",
        )


def _vcore_rules(recipe: Recipe) -> Iterator[BrokenRule]:
    method, batch = recipe.method, recipe.batch
    if method.alpha_scope == "micro_batch" and method.alpha in ("effective_sample_size", "none"):
        yield BrokenRule(
            ("method.alpha_scope", "method.alpha"),
            "global_batch: this alpha depends on no other sequence (or set method.alpha to loss_ratio)",
        )
    if method.alpha == "variance" and method.alpha_scope == "global_batch" and batch.global_size == 1:
        yield BrokenRule(
            ("method.alpha", "batch.global_size"),
            "loss_ratio: one sequence has no variance (or set batch.global_size to at least 2)",
        )
    is_single = batch.pack_tokens_per_rank is None and batch.micro_batch_size_per_rank in (1, "auto")
    if method.alpha == "variance" and method.alpha_scope == "micro_batch" and is_single:
        yield BrokenRule(
            ("method.alpha", "method.alpha_scope", "batch.micro_batch_size_per_rank"),
            "loss_ratio: one sequence has no variance (or set method.alpha_scope to global_batch)",
        )
    is_batch_wide = method.scope == "sequence_and_batch"
    if is_batch_wide != (method.batch_kl_budget is not None):
        budget = "the budget of the sequence weights in nats, such as 0.1"
        yield BrokenRule(
            ("method.batch_kl_budget", "method.scope"),
            budget if is_batch_wide else "null, or method.scope sequence_and_batch",
        )
    if is_batch_wide and method.alpha_scope == "micro_batch":
        yield BrokenRule(
            ("method.alpha_scope", "method.scope"), "global_batch: sequences of the whole batch share one budget"
        )
    if is_batch_wide and batch.global_size == 1:
        yield BrokenRule(
            ("batch.global_size", "method.scope"),
            "at least 2 sequences, which share the weight (or set method.scope to sequence)",
        )
    optimizer = {"sgd": recipe.optimizer.name, "adam": "adamw", "muon": "muon"}[recipe.probe.direction]
    if recipe.optimizer.name != optimizer:
        expected = "muon or sgd" if recipe.optimizer.name == "muon" else "sgd"
        yield BrokenRule(
            ("probe.direction", "optimizer.name", "method.name"),
            f"{expected}: the direction must match the optimizer (or set optimizer.name to {optimizer})",
        )
    if recipe.probe.rank is not None and recipe.utility.estimator == "finite_difference":
        yield BrokenRule(
            ("probe.rank", "utility.estimator"),
            "null: a finite difference all-gathers no direction (or set utility.estimator to jvp)",
        )
    if recipe.probe.rank is not None and recipe.lora is not None:
        yield BrokenRule(("probe.rank", "lora.rank"), "null: LoRA adapters have low rank already")
    if recipe.probe.rank_passes > 1 and recipe.probe.rank is None:
        yield BrokenRule(("probe.rank_passes", "probe.rank"), "1 without probe.rank (or set probe.rank)")


def _utility_rules(recipe: Recipe) -> Iterator[BrokenRule]:
    utility = recipe.utility
    if utility.estimator == "finite_difference" and utility.epsilon is None:
        yield BrokenRule(
            ("utility.epsilon", "utility.estimator"),
            "the step of the finite difference: auto, or a number (1.0e-4 in the paper, mostly rounding in bf16)",
        )
    if utility.estimator == "jvp" and utility.epsilon is not None:
        yield BrokenRule(
            ("utility.epsilon", "utility.estimator"),
            "null: jvp is exact and has no step (or set utility.estimator to finite_difference)",
        )
    if utility.fused is True and utility.estimator != "jvp":
        yield BrokenRule(
            ("utility.fused", "utility.estimator"),
            "auto: the second forward of a finite difference needs other weights (or set utility.estimator to jvp)",
        )
    if utility.tangent_precision is not None:
        for key, value, expected in (
            ("utility.estimator", utility.estimator, "jvp"),
            ("model.precision", recipe.model.precision, "bf16"),
            ("model.provider", recipe.model.provider, "huggingface"),
        ):
            if value != expected:
                yield BrokenRule(("utility.tangent_precision", key), f"null (or set {key} to {expected})")
    if utility.rounding == "stochastic" and utility.estimator == "jvp":
        yield BrokenRule(
            ("utility.rounding", "utility.estimator"),
            "nearest: jvp perturbs no parameters (or set utility.estimator to finite_difference)",
        )


def _batch_rules(recipe: Recipe) -> Iterator[BrokenRule]:
    key, is_packed = "micro_batch_size_per_rank", recipe.batch.pack_tokens_per_rank is not None
    if not is_packed and recipe.utility.micro_batch_size_per_rank and recipe.batch.micro_batch_size_per_rank == "auto":
        yield BrokenRule(
            (f"utility.{key}", f"batch.{key}"),
            "null, or a number in both: a gradient-free forward merges micro-batches of the main batch",
        )
    for section in ("batch", "probe", "utility"):
        if is_packed and getattr(recipe, section).micro_batch_size_per_rank not in (None, 1, "auto"):
            yield BrokenRule(
                (f"{section}.{key}", "batch.pack_tokens_per_rank"),
                "1: a micro-batch is one pack of pack_tokens_per_rank tokens",
            )


def _data_rules(recipe: Recipe) -> Iterator[BrokenRule]:
    data, method, size, keep = recipe.data, recipe.method, recipe.batch.global_size, recipe.data.keep
    if recipe.probe.batch_size == "all" and data.probe_path is None:
        yield BrokenRule(
            ("probe.batch_size", "data.probe_path"),
            "a number: without a pool the probe is drawn from the training data (or set data.probe_path)",
        )
    num_trusted = round(data.trusted_share * size)
    if data.trusted_share > 0 and data.probe_path is None:
        yield BrokenRule(
            ("data.trusted_share", "data.probe_path"), "0, or the trusted conversations in data.probe_path"
        )
    if data.trusted_share > 0 and not 0 < num_trusted < size:
        yield BrokenRule(
            ("data.trusted_share", "batch.global_size"),
            f"between 1 and {size - 1} of them" if size > 1 else "batch.global_size 2 or more",
            f"{data.trusted_share} together with batch.global_size {size}, which is "
            + count(num_trusted, "trusted sequence"),
        )
    if data.trusted_share > 0 and (method.drops_tokens or method.reads_reference or method.name == "stored"):
        yield BrokenRule(
            ("data.trusted_share", "method.name"),
            "0: that method needs data of each sequence that only the training data has",
        )
    needs_reference = method.reads_reference and recipe.lora is None
    if needs_reference != (data.reference_log_probabilities is not None):
        yield BrokenRule(
            ("data.reference_log_probabilities", "method.name", "lora"),
            "the file that `vcore-ds reference RECIPE --output FILE` writes before training (or set lora)"
            if needs_reference
            else "null: only iw_sft with lora null reads reference log-probabilities",
        )
    if (method.name == "stored") != (data.token_weights is not None):
        yield BrokenRule(
            ("data.token_weights", "method.name"),
            "the file that `vcore-ds keep SCORES --weights kl_budget=NUMBER --output FILE` writes"
            if data.token_weights is None
            else "null: only method.name stored reads token weights",
        )
    if recipe.run.validate_every is not None and data.validation_path is None:
        yield BrokenRule(
            ("run.validate_every", "data.validation_path"), "null, or held-out conversations in data.validation_path"
        )
    if keep is not None and (keep.top is None) == (keep.above is None):
        yield BrokenRule(
            ("data.keep.top", "data.keep.above"),
            "exactly one of top (share of the traces) and above (utility); the other is null",
        )
    if keep is not None and keep.top is None and keep.above is not None and keep.within == "source":
        yield BrokenRule(
            ("data.keep.within", "data.keep.above"),
            "all: a threshold keeps the same traces either way (or give data.keep.top)",
        )


def _model_rules(recipe: Recipe) -> Iterator[BrokenRule]:
    model, parallel = recipe.model, recipe.parallel
    if model.attention == "flash_attention_2" and model.precision == "fp32":
        yield BrokenRule(
            ("model.attention", "model.precision"), "auto, sdpa or eager: flash_attention_2 computes in 16 bits only"
        )
    if model.activation_offload and not model.gradient_checkpointing:
        yield BrokenRule(
            ("model.activation_offload", "model.gradient_checkpointing"),
            "false: only activation checkpoints are offloaded (or set model.gradient_checkpointing to true)",
        )
    if parallel.expert > 1 and model.provider == "megatron":
        yield BrokenRule(
            ("parallel.expert", "model.provider"),
            "1: the megatron provider has dense models only (or set model.provider to huggingface)",
        )
    if parallel.expert > 1 and recipe.lora is not None and "experts" in recipe.lora.target_modules:
        yield BrokenRule(
            ("parallel.expert", "lora.target_modules"),
            "1: adapters on experts are not sharded (or remove experts from lora.target_modules)",
        )
    if parallel.tensor > 1 and model.provider == "huggingface":
        yield BrokenRule(
            ("parallel.tensor", "model.provider"),
            "1: Hugging Face's layers are not tensor-parallel (or set model.provider to megatron)",
        )
    if recipe.lora is not None and model.provider == "megatron":
        yield BrokenRule(
            ("model.provider", "lora.rank"),
            "huggingface: LoRA needs no tensor parallelism, and a 32B model fits on one node (or set lora to null)",
        )
    if model.attention != "auto" and model.provider == "megatron":
        yield BrokenRule(
            ("model.attention", "model.provider"), "auto: the others are attention implementations of Hugging Face"
        )


def _training_rules(recipe: Recipe) -> Iterator[BrokenRule]:
    optimizer, schedule = recipe.optimizer, recipe.schedule
    for key in [key for key in FOREIGN_KEYS[optimizer.name] if key in optimizer.model_fields_set]:
        owner = "muon" if key == "momentum" else "adamw"
        yield BrokenRule((f"optimizer.{key}", "optimizer.name"), f"no such key: it belongs to {owner} (remove it)")
    if optimizer.name == "muon" and recipe.lora is not None:
        yield BrokenRule(
            ("optimizer.name", "lora.rank"),
            "adamw: Muon orthogonalizes whole matrices, not the factors of adapters (or set lora to null)",
        )
    if optimizer.name == "muon" and recipe.model.provider == "megatron":
        yield BrokenRule(
            ("optimizer.name", "model.provider"),
            "adamw: Muon needs whole matrices on each rank (or set model.provider to huggingface)",
        )
    if (schedule.num_steps is None) == (schedule.num_epochs is None):
        yield BrokenRule(
            ("schedule.num_steps", "schedule.num_epochs"),
            "exactly one of num_steps (optimizer steps) and num_epochs (passes over the data); the other is null",
        )


def _checkpoint_rules(recipe: Recipe) -> Iterator[BrokenRule]:
    best = "checkpoint.keep_best"
    if recipe.checkpoint.keep_best is None:
        return
    if recipe.data.validation_path is None:
        yield BrokenRule((best, "data.validation_path"), "null, or held-out conversations in data.validation_path")
    elif recipe.run.validate_every is None:
        yield BrokenRule((best, "run.validate_every"), "null, or the interval of evaluations in run.validate_every")
    elif (first_compared_step(recipe.checkpoint, recipe.run) or math.inf) >= (recipe.schedule.num_steps or math.inf):
        yield BrokenRule(
            (best, "checkpoint.every_steps", "run.validate_every", "schedule.num_steps"),
            "null, or an evaluated checkpoint before the last step: every_steps equal to validate_every",
        )


def first_compared_step(checkpoint: sections.CheckpointConfig, run: sections.RunConfig) -> int | None:
    """The first step with both a checkpoint and an evaluation (`checkpoint.keep_best`); None without such a step."""
    evaluated = run.validate_every
    every = [n for n in (checkpoint.every_steps, checkpoint.keep_every_steps) if n is not None]
    return min((math.lcm(n, evaluated) for n in every), default=None) if evaluated is not None else None
