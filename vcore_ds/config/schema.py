"""The recipe: its sections, the rules over several keys, and the keys that may change when a run is resumed."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Self

from pydantic import Field, model_validator

from vcore_ds.config import sections
from vcore_ds.config.data_section import DataConfig, KeepConfig
from vcore_ds.config.method_section import MethodConfig


class RuleViolations(ValueError):
    """Rules over several keys that a recipe breaks: (dotted keys, `found ...; expected ...`), by their first key."""

    def __init__(self, problems: Sequence[tuple[tuple[str, ...], str]]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(f"{keys[0]}: {text}" for keys, text in problems))


class Recipe(sections.Section):
    """A complete description of a run: the same recipe and data give the same run."""

    method: MethodConfig = Field(default_factory=MethodConfig)
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
        if broken := list_violations(self):
            raise RuleViolations(broken)
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


def list_violations(recipe: Recipe) -> list[tuple[tuple[str, ...], str]]:
    """(dotted keys, `found ...; expected ...`) of each rule over several keys that the recipe breaks."""
    broken = [(tuple(keys.split()), expected) for keys, expected in _iter_violations(recipe)]
    return [(keys, f"found {_show(recipe, keys)}; expected {text}") for keys, text in broken]


def section_class(*names: str) -> type[sections.Section]:
    """The class of a section (`data`) or nested section (`data`, `keep`)."""
    return SUBSECTIONS[names[0], names[1]] if len(names) == 2 else SECTIONS[names[0]]


def _show(recipe: Recipe, keys: Sequence[str]) -> str:
    """The values of dotted keys: `VALUE together with KEY VALUE and KEY VALUE`."""
    values = [attrgetter(key)(recipe) for key in keys]
    texts = [
        "not null" if isinstance(value, sections.Section) else value if isinstance(value, str) else json.dumps(value)
        for value in values
    ]
    return f"{texts[0]} together with " + " and ".join(map(" ".join, zip(keys[1:], texts[1:], strict=True)))


Rules = Iterator[tuple[str, str]]
"""Violated rules: dotted keys, of which the message names the first, and what is expected."""


def _iter_violations(recipe: Recipe) -> Rules:
    yield from _method_rules(recipe)
    if recipe.method.name in ("vcore", "custom"):
        yield from _weighting_rules(recipe)
    yield from _utility_rules(recipe)
    yield from _batch_rules(recipe)
    yield from _data_rules(recipe)
    yield from _model_rules(recipe)
    yield from _training_rules(recipe)
    yield from _checkpoint_rules(recipe)


def _method_rules(recipe: Recipe) -> Rules:
    method = recipe.method
    is_vcore = method.name == "vcore"
    if method.name == "custom" and method.function is None:
        yield "method.function method.name", "the function that weights tokens, MODULE:FUNCTION"
    if method.name == "custom" and method.scope != "sequence":
        yield "method.scope method.name", "sequence: a function gives the weights of sequences too"
    if is_vcore and (method.kl_budget is None) == (method.temperature is None):
        one = "start from kl_budget 0.005" if method.kl_budget is None else "set the other to null"
        yield "method.kl_budget method.temperature method.name", f"exactly one of both: {one}"
    for key in ("temperature", "kl_budget"):
        if not is_vcore and getattr(method, key) is not None:
            yield f"method.{key} method.name", "null: only vcore weights tokens by utility (or set method.name vcore)"
    if method.is_anchored and recipe.lora is None:
        expected = "LoRA adapters, without which the model is asft's base model (set lora.rank, or method.name to dft)"
        yield "lora method.name", expected


def _weighting_rules(recipe: Recipe) -> Rules:
    method, batch, optimizer, probe = recipe.method, recipe.batch, recipe.optimizer, recipe.probe
    is_global = method.alpha_scope == "global_batch"
    if not is_global and method.alpha in ("effective_sample_size", "none"):
        expected = "global_batch: this alpha depends on no other sequence (or set method.alpha to loss_ratio)"
        yield "method.alpha_scope method.alpha", expected
    if method.alpha == "variance" and not method.uses_utilities:
        yield "method.alpha method.name", "loss_ratio or none: a function without utilities has no variance of them"
    one_sequence = "loss_ratio: one sequence has no variance"
    if method.alpha == "variance" and is_global and batch.global_size == 1:
        yield "method.alpha batch.global_size", f"{one_sequence} (or set batch.global_size to at least 2)"
    is_single = batch.pack_tokens_per_rank is None and batch.micro_batch_size_per_rank in (1, "auto")
    if method.alpha == "variance" and not is_global and is_single:
        keys = "method.alpha method.alpha_scope batch.micro_batch_size_per_rank"
        yield keys, f"{one_sequence} (or set method.alpha_scope to global_batch)"
    if method.scope == "sequence_and_batch":
        if method.batch_kl_budget is None:
            yield "method.batch_kl_budget method.scope", "the budget of the sequence weights in nats, such as 0.1"
        if not is_global:
            yield "method.alpha_scope method.scope", "global_batch: sequences of the whole batch share one budget"
        if batch.global_size == 1:
            expected = "at least 2 sequences, which share the weight (or set method.scope to sequence)"
            yield "batch.global_size method.scope", expected
    elif method.batch_kl_budget is not None:
        yield "method.batch_kl_budget method.scope", "null, or method.scope sequence_and_batch"
    if not method.uses_utilities:
        return
    needed = {"sgd": optimizer.name, "adam": "adamw", "muon": "muon"}[probe.direction]
    if optimizer.name != needed:
        fitting = "muon or sgd" if optimizer.name == "muon" else "sgd"
        expected = f"{fitting}: the direction must match the optimizer (or set optimizer.name to {needed})"
        yield "probe.direction optimizer.name method.name", expected
    if probe.rank is not None and recipe.utility.estimator == "finite_difference":
        expected = "null: a finite difference all-gathers no direction (or set utility.estimator to jvp)"
        yield "probe.rank utility.estimator", expected
    if probe.rank is not None and recipe.lora is not None:
        yield "probe.rank lora.rank", "null: LoRA adapters have low rank already"
    if probe.rank_passes > 1 and probe.rank is None:
        yield "probe.rank_passes probe.rank", "1 without probe.rank (or set probe.rank)"


def _utility_rules(recipe: Recipe) -> Rules:
    utility, is_jvp = recipe.utility, recipe.utility.estimator == "jvp"
    if not is_jvp and utility.epsilon is None:
        expected = "the step of the finite difference: auto, or a number (1.0e-4 in the paper, mostly rounding in bf16)"
        yield "utility.epsilon utility.estimator", expected
    if is_jvp and utility.epsilon is not None:
        expected = "null: jvp is exact and has no step (or set utility.estimator to finite_difference)"
        yield "utility.epsilon utility.estimator", expected
    if utility.fused is True and not is_jvp:
        expected = "auto: a finite difference's second forward needs other weights (or set utility.estimator to jvp)"
        yield "utility.fused utility.estimator", expected
    if is_jvp and utility.rounding == "stochastic":
        expected = "nearest: jvp perturbs no parameters (or set utility.estimator to finite_difference)"
        yield "utility.rounding utility.estimator", expected
    if utility.tangent_precision is not None:
        needed = {"utility.estimator": "jvp", "model.precision": "bf16", "model.provider": "huggingface"}
        for key, value in needed.items():
            if attrgetter(key)(recipe) != value:
                yield f"utility.tangent_precision {key}", f"null (or set {key} to {value})"


def _batch_rules(recipe: Recipe) -> Rules:
    key, is_packed = "micro_batch_size_per_rank", recipe.batch.pack_tokens_per_rank is not None
    if not is_packed and recipe.utility.micro_batch_size_per_rank and recipe.batch.micro_batch_size_per_rank == "auto":
        expected = "null, or a number in both: a gradient-free forward merges micro-batches of the main batch"
        yield f"utility.{key} batch.{key}", expected
    for section in ("batch", "probe", "utility"):
        if is_packed and getattr(recipe, section).micro_batch_size_per_rank not in (None, 1, "auto"):
            keys = f"{section}.{key} batch.pack_tokens_per_rank"
            yield keys, "1: a micro-batch is one pack of pack_tokens_per_rank tokens"


def _data_rules(recipe: Recipe) -> Rules:
    data, method, size, keep = recipe.data, recipe.method, recipe.batch.global_size, recipe.data.keep
    if recipe.probe.batch_size == "all" and data.probe_path is None:
        expected = "a number: without a pool the probe is drawn from the training data (or set data.probe_path)"
        yield "probe.batch_size data.probe_path", expected
    if data.trusted_share > 0:
        if data.probe_path is None:
            yield "data.trusted_share data.probe_path", "0, or the trusted conversations in data.probe_path"
        if not 0 < round(data.trusted_share * size) < size:
            expected = f"a share of 1 to {size - 1} sequences" if size > 1 else "batch.global_size 2 or more"
            yield "data.trusted_share batch.global_size", expected
        if method.drops_tokens or method.reads_reference or method.name == "stored":
            expected = "0: that method needs data of each sequence that only the training data has"
            yield "data.trusted_share method.name", expected
    needs_reference = method.reads_reference and recipe.lora is None
    if needs_reference != (data.reference_log_probabilities is not None):
        needed = "the file that `vcore-ds reference RECIPE --output FILE` writes before training (or set lora)"
        unused = "null: only iw_sft with lora null reads reference log-probabilities"
        yield "data.reference_log_probabilities method.name lora", needed if needs_reference else unused
    if (method.name == "stored") != (data.token_weights is not None):
        needed = "the file that `vcore-ds keep SCORES --weights kl_budget=NUMBER --output FILE` writes"
        unused = "null: only method.name stored reads token weights"
        yield "data.token_weights method.name", needed if data.token_weights is None else unused
    if data.validation_path is not None and data.validation_share is not None:
        yield "data.validation_share data.validation_path", "one of the two; the other is null"
    if isinstance(recipe.run.validate_every, int) and not data.has_held_out:
        yield "run.validate_every data.validation_path", HELD_OUT_NEEDED
    if keep is not None and (keep.top is None) == (keep.above is None):
        expected = "exactly one of top (share of the traces) and above (utility); the other is null"
        yield "data.keep.top data.keep.above", expected
    elif keep is not None and keep.top is None and keep.within == "source":
        expected = "all: a threshold keeps the same traces either way (or give data.keep.top)"
        yield "data.keep.within data.keep.above", expected


def _model_rules(recipe: Recipe) -> Rules:
    model, parallel, lora = recipe.model, recipe.parallel, recipe.lora
    if model.attention == "flash_attention_2" and model.precision == "fp32":
        expected = "auto, sdpa or eager: flash_attention_2 computes in 16 bits only"
        yield "model.attention model.precision", expected
    if model.activation_offload and not model.gradient_checkpointing:
        expected = "false: only activation checkpoints are offloaded (or set model.gradient_checkpointing to true)"
        yield "model.activation_offload model.gradient_checkpointing", expected
    if parallel.expert > 1 and lora is not None and "experts" in lora.target_modules:
        expected = "1: adapters on experts are not sharded (or remove experts from lora.target_modules)"
        yield "parallel.expert lora.target_modules", expected
    if model.provider == "huggingface" and parallel.tensor > 1:
        expected = "1: Hugging Face's layers are not tensor-parallel (or set model.provider to megatron)"
        yield "parallel.tensor model.provider", expected
    if model.provider == "megatron" and parallel.expert > 1:
        expected = "1: the megatron provider has dense models only (or set model.provider to huggingface)"
        yield "parallel.expert model.provider", expected
    if model.provider == "megatron" and lora is not None:
        expected = "huggingface: LoRA needs no tensor parallelism, and a 32B model fits on one node (or set lora null)"
        yield "model.provider lora.rank", expected
    if model.provider == "megatron" and model.attention != "auto":
        yield "model.attention model.provider", "auto: the others are attention implementations of Hugging Face"


def _training_rules(recipe: Recipe) -> Rules:
    optimizer, schedule = recipe.optimizer, recipe.schedule
    for key in [key for key in FOREIGN_KEYS[optimizer.name] if key in optimizer.model_fields_set]:
        owner = "muon" if key == "momentum" else "adamw"
        yield f"optimizer.{key} optimizer.name", f"no such key: it belongs to {owner} (remove it)"
    if optimizer.name == "muon" and recipe.lora is not None:
        expected = "adamw: Muon orthogonalizes whole matrices, not the factors of adapters (or set lora to null)"
        yield "optimizer.name lora.rank", expected
    if optimizer.name == "muon" and recipe.model.provider == "megatron":
        expected = "adamw: Muon needs whole matrices on each rank (or set model.provider to huggingface)"
        yield "optimizer.name model.provider", expected
    if (schedule.num_steps is None) == (schedule.num_epochs is None):
        expected = "exactly one of num_steps (optimizer steps) and num_epochs (passes over the data); the other is null"
        yield "schedule.num_steps schedule.num_epochs", expected


HELD_OUT_NEEDED = "null, or held-out conversations in data.validation_path or by data.validation_share"


def _checkpoint_rules(recipe: Recipe) -> Rules:
    best = "checkpoint.keep_best"
    if recipe.checkpoint.keep_best is None:
        return
    if not recipe.data.has_held_out:
        yield f"{best} data.validation_path", HELD_OUT_NEEDED
    elif not isinstance(recipe.run.validate_every, int):
        yield f"{best} run.validate_every", "null, or the interval of evaluations in run.validate_every"
    elif (first_compared_step(recipe.checkpoint, recipe.run) or math.inf) >= (recipe.schedule.num_steps or math.inf):
        expected = "null, or an evaluated checkpoint before the last step: every_steps equal to validate_every"
        yield f"{best} checkpoint.every_steps run.validate_every schedule.num_steps", expected


def first_compared_step(checkpoint: sections.CheckpointConfig, run: sections.RunConfig) -> int | None:
    """The first step with both a checkpoint and an evaluation (`checkpoint.keep_best`); None without such a step."""
    evaluated = run.validate_every
    every = [n for n in (checkpoint.every_steps, checkpoint.keep_every_steps) if n is not None]
    return min((math.lcm(n, evaluated) for n in every), default=None) if isinstance(evaluated, int) else None


MAY_DIFFER = frozenset(
    {
        # Printing, measuring and saving.
        "run.output_dir",
        "run.log_every",
        "run.validate_every",
        "run.num_token_records",
        "run.num_followed_traces",
        "run.time_limit_minutes",
        "run.profile",
        "method.function",  # its place; function_digest has its name and source
        *(f"run.profile.{key}" for key in sections.ProfileConfig.key_names()),
        "data.validation_path",
        # The data; the checkpoint has digests of its tokens, of the weights of files and of the selected traces.
        "data.train_path",
        "data.probe_path",
        "data.trusted_overlap",
        "data.keep.scores",
        "data.cache_dir",
        "data.split",
        "data.columns",
        "data.max_malformed",
        # These change results only by rounding.
        "batch.micro_batch_size_per_rank",
        "batch.pack_tokens_per_rank",
        "batch.sequence_parallel",
        "probe.sequence_parallel",
        "probe.micro_batch_size_per_rank",
        "utility.micro_batch_size_per_rank",
        "utility.fused",
        "model.attention",
        "model.gradient_checkpointing",
        "model.activation_offload",
        "parallel.expert",
    }
)
"""Dotted keys that may change when a run is resumed."""

SECTIONS_THAT_MAY_DIFFER = frozenset({"track", "checkpoint", "engine", "schedule"})
"""Sections of which all keys may change; `schedule` as far as the steps taken keep their learning rates, which a run
checks."""


def differing_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old value, new value) of every key that has changed and may not when a run is resumed."""
    before, after = flat_values(old), flat_values(new)
    return {
        key: (before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and not _may_differ(key, new)
    }


def _may_differ(key: str, recipe: Recipe) -> bool:
    sizes = ("batch.micro_batch_size_per_rank", "batch.pack_tokens_per_rank", "batch.sequence_parallel")
    if key in sizes and recipe.method.alpha_scope == "micro_batch":
        return False  # alpha depends on which sequences share a micro-batch
    return key in MAY_DIFFER or key.partition(".")[0] in SECTIONS_THAT_MAY_DIFFER


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """Dotted key -> value, as in recipe.yaml; a section that is null is one key."""
    return dict(iter_values(recipe.model_dump(mode="json")))


def iter_values(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of sections and nested sections; another mapping, such as data.validation_path, is a
    value."""
    for name, value in values.items():
        key = f"{within}{name}"
        if isinstance(value, Mapping) and is_section(key):
            yield from iter_values(value, f"{key}.")
        else:
            yield key, value


def is_section(key: str) -> bool:
    """Whether a dotted key is that of a section or a nested section."""
    return "." not in key or tuple(key.split(".")) in SUBSECTIONS
