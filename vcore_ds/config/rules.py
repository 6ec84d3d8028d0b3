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
    yield from _training_rules(recipe)


def _method_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    method, utility = recipe.method, recipe.utility
    tilt = {"temperature": method.temperature, "kl_budget": method.kl_budget}
    given = {key: value for key, value in tilt.items() if value is not None}
    if method.name == "vcore" and len(given) != 1:
        yield BrokenRule(
            ("method.kl_budget", "method.temperature", "method.name"),
            " and ".join(f"{key} {value}" for key, value in given.items()) or "neither temperature nor kl_budget",
            "exactly one of method.temperature and method.kl_budget with method.name vcore; "
            + ("set the other to null" if given else "start from method.kl_budget: 0.05"),
        )
    if method.name == "sft":
        for key, value in given.items():
            yield BrokenRule(
                (f"method.{key}", "method.name"),
                f"{value} together with method.name sft",
                f"null: sft weights tokens equally (set method.{key} to null, or method.name to vcore)",
            )
    if utility.estimator == "finite_difference" and utility.epsilon is None:
        yield BrokenRule(
            ("utility.epsilon", "utility.estimator"),
            "null together with utility.estimator finite_difference",
            "the step of the finite difference, such as 1.0e-4 (the paper's; in bf16 prefer utility.estimator jvp)",
        )
    if utility.estimator == "jvp" and utility.epsilon is not None:
        yield BrokenRule(
            ("utility.epsilon", "utility.estimator"),
            f"{utility.epsilon} together with utility.estimator jvp",
            "null: jvp is exact and has no step (or set utility.estimator to finite_difference)",
        )


def _training_rules(recipe: "Recipe") -> Iterator[BrokenRule]:
    model, data, batch = recipe.model, recipe.data, recipe.batch
    optimizer, schedule, run = recipe.optimizer, recipe.schedule, recipe.run
    if model.attention == "flash_attention_2" and model.precision == "fp32":
        yield BrokenRule(
            ("model.attention", "model.precision"),
            "flash_attention_2 together with model.precision fp32",
            "sdpa or eager: flash_attention_2 computes in 16 bits only",
        )
    if batch.global_size % batch.micro_batch_size_per_rank != 0:
        micro = batch.micro_batch_size_per_rank
        below, above = batch.global_size // micro * micro, -(-batch.global_size // micro) * micro
        nearest = f"{below} or {above}" if below else f"{above}"
        yield BrokenRule(
            ("batch.global_size", "batch.micro_batch_size_per_rank"),
            f"{batch.global_size} together with batch.micro_batch_size_per_rank {micro}",
            f"a multiple of {micro} on any number of ranks; nearest: {nearest}",
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
