"""The card of a result (README.md): what was trained from what, on how much data, how, and what came of it.

Everything is read from the run's folder, so a result that is exported later has the same card. No path of the machine
is in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCardData

from vcore_ds.config.resume import flat_values
from vcore_ds.config.schema import Recipe
from vcore_ds.config.yaml_text import dump_yaml
from vcore_ds.errors import UserError
from vcore_ds.files.base_model import OWN_TAG, BaseModel, base_model_of
from vcore_ds.files.evaluation_folder import TaskResult, read_evaluation
from vcore_ds.files.run_folder import DataCounts, read_data_counts, read_environment
from vcore_ds.results.presentation import markdown_rows
from vcore_ds.results.public_recipe import public_recipe, public_source
from vcore_ds.results.run_reader import HeldOutLosses, read_held_out_losses, read_metrics_of

METHODS = {"vcore": "VCORE", "sft": "SFT", "dft": "DFT", "iw_sft": "iw-SFT", "random": "random masking"}

_SHOWN = (
    "method.normalization", "method.temperature", "method.kl_budget", "method.base_measure", "method.scope",
    "method.alpha", "method.alpha_cap", "method.keep_share", "utility.estimator", "utility.epsilon", "probe.batch_size",
    "lora.rank", "lora.alpha", "lora.dropout", "lora.target_modules", "optimizer.name", "optimizer.learning_rate",
    "optimizer.betas", "optimizer.weight_decay", "optimizer.gradient_clipping", "schedule.kind",
    "schedule.warmup_ratio", "batch.global_size", "data.cutoff_length", "model.precision", "run.seed",
)  # fmt: skip
"""Keys in the table of hyperparameters; the whole recipe follows it."""
_OF_VCORE = ("method.temperature", "method.kl_budget", "method.base_measure", "method.scope", "method.alpha",
             "method.alpha_cap", "utility.estimator", "utility.epsilon", "probe.batch_size")  # fmt: skip
_OF_RANDOM = ("method.keep_share",)

Kind = Literal["adapter", "model", "merged"]


@dataclass(frozen=True)
class CardRequest:
    """Which result a card describes."""

    kind: Kind
    step: int | None = None
    """Optimizer steps that the exported checkpoint has taken; None for the end of the run."""
    base: BaseModel | None = None
    """None for what is found out about model.path."""
    evaluations: Sequence[Path] = ()
    """Folders with an evaluation.json of this result."""


def model_card(folder: Path, recipe: Recipe, request: CardRequest) -> str:
    """The text of the card, with the hub's metadata in front.

    Args:
        folder: the run's.

    Raises:
        UserError: a file of the run or an evaluation is damaged.
    """
    base = request.base or base_model_of(recipe.model.path)
    try:
        lines = read_metrics_of(folder)
    except UserError:  # removed, or damaged: no reason to have no result
        lines = []
    last = int(lines[-1]["step"] or 0) if lines else None
    at_end = request.step is None or request.step == last
    lines = [line for line in lines if request.step is None or (line["step"] or 0) <= request.step]
    evaluations = [
        found for path in request.evaluations for found in read_evaluation(path, "--evaluation").tasks.items()
    ]
    metadata = _metadata(recipe, request, base, read_data_counts(folder), evaluations)
    sections = [
        _summary(recipe, request, base, last),
        _data(read_data_counts(folder), lines, recipe.schedule.num_steps),
        _losses(lines, read_held_out_losses(folder) if at_end else HeldOutLosses({}, {})),
        _evaluation(evaluations),
        _hyperparameters(recipe),
        _use(recipe, request, base),
        _origin(read_environment(folder), lines),
        f"## Recipe\n\n```yaml\n{dump_yaml(public_recipe(recipe, base)).strip()}\n```",
    ]
    return f"---\n{metadata}\n---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def _metadata(
    recipe: Recipe,
    request: CardRequest,
    base: BaseModel,
    counts: Sequence[DataCounts],
    evaluations: Sequence[tuple[str, TaskResult]],
) -> str:
    """YAML by huggingface_hub's own class."""
    hub_data = sorted({name for entry in counts for name in entry.hub_ids})
    results = [
        EvalResult("text-generation", name, name, "accuracy", round(found.accuracy, 4)) for name, found in evaluations
    ]
    of_license: dict[str, Any] = dict(base.license)  # keys of LICENSE_KEYS
    card = ModelCardData(
        base_model=base.hub_id,
        base_model_relation=None if base.hub_id is None else "adapter" if request.kind == "adapter" else "finetune",
        library_name="peft" if request.kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        datasets=hub_data or None,
        tags=[OWN_TAG, recipe.method.name, *(["lora"] if recipe.lora is not None else [])],
        eval_results=results or None,
        model_name=_title(recipe, base) if results else None,
        **of_license,
    )
    return card.to_yaml()


def _title(recipe: Recipe, base: BaseModel) -> str:
    how = "LoRA" if recipe.lora is not None else "all parameters"
    return f"{base.name}, fine-tuned with {METHODS[recipe.method.name]} ({how})"


def _summary(recipe: Recipe, request: CardRequest, base: BaseModel, last: int | None) -> str:
    linked = f"[{base.hub_id}](https://huggingface.co/{base.hub_id})" if base.hub_id else f"`{base.name}`"
    what = {
        "adapter": f"A LoRA adapter for {linked}",
        "merged": f"{linked} with a LoRA adapter merged in",
        "model": f"{linked} with all parameters fine-tuned",
    }[request.kind]
    method = METHODS[recipe.method.name]
    if recipe.method.uses_utilities:
        method += ". It weights every token of a trace by how much learning it lowers the loss on other traces"
    text = f"# {_title(recipe, base)}\n\n{what}, trained with `vcore_ds`, method {method}."
    if request.step is not None and request.step != last:
        text += f" The weights are those after {request.step:,} optimizer steps, before the end of the run."
    if base.hub_id is not None and base.hub_id.rpartition("/")[2] != base.name:
        text += f" Training began with `{base.name}`, a local folder that was made from it."
    if not base.license:
        text += "\n\nThe license of the base model is not known here; it applies to this model too."
    elif "license" in base.license:
        text += f"\n\nLicense of the base model, which applies to this model too: {base.license['license']}."
    return text


def _data(counts: Sequence[DataCounts], lines: Sequence[Mapping[str, float | None]], num_planned: int | None) -> str:
    rows = [
        [
            entry.part,
            public_source(entry.path),
            *(f"{number:,}" for number in (entry.sequences, entry.tokens, entry.supervised_tokens)),
        ]
        for entry in counts
    ]
    text = "## Data\n\n" + _table(["part", "source", "sequences", "tokens", "supervised tokens"], rows) if rows else ""
    if lines:
        seen, supervised = (sum(line.get(key) or 0 for line in lines) for key in ("sequences", "supervised_tokens"))
        planned = f" of {num_planned:,}" if num_planned is not None and len(lines) < num_planned else ""
        trained = (
            f"Trained for {len(lines):,}{planned} optimizer steps on {seen:,.0f} sequences with {supervised:,.0f} "
            "supervised tokens, repetitions counted."
        )
        text = f"{text}\n\n{trained}" if text else f"## Data\n\n{trained}"
    return text


def _losses(lines: Sequence[Mapping[str, float | None]], held_out: HeldOutLosses) -> str:
    rows = [
        [f"held-out loss{name and f', {name}'}", _number(held_out.before.get(name)), _number(loss)]
        for name, loss in held_out.after.items()
    ]
    if lines:
        rows.append(["training loss, first and last step", *(_number(lines[i].get("loss")) for i in (0, -1))])
    return "## Losses\n\nMean nats per token.\n\n" + _table(["", "before", "after"], rows) if rows else ""


def _evaluation(evaluations: Sequence[tuple[str, TaskResult]]) -> str:
    rows = [
        [name, f"{found.num_problems:,}", f"{found.accuracy:.1%}", f"{found.truncated_share:.1%}"]
        for name, found in evaluations
    ]
    return "## Evaluation\n\n" + _table(["task", "problems", "accuracy", "truncated answers"], rows) if rows else ""


def _hyperparameters(recipe: Recipe) -> str:
    values = flat_values(recipe)
    hidden = set() if recipe.method.uses_utilities else set(_OF_VCORE)
    hidden |= set() if recipe.method.drops_tokens else set(_OF_RANDOM)
    shown = [key for key in _SHOWN if key not in hidden and values.get(key) is not None]
    rows = [[f"`{key}`", _setting(values[key])] for key in [*shown, *recipe.retired]]
    return "## Hyperparameters\n\n" + _table(["key", "value"], rows)


def _use(recipe: Recipe, request: CardRequest, base: BaseModel) -> str:
    load = (
        f'from peft import PeftModel\n\nbase = AutoModelForCausalLM.from_pretrained("{base.public_name}")\n'
        'model = PeftModel.from_pretrained(base, "THIS_REPOSITORY")'
        if request.kind == "adapter"
        else '\nmodel = AutoModelForCausalLM.from_pretrained("THIS_REPOSITORY")'
    )
    return (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f'{load}\ntokenizer = AutoTokenizer.from_pretrained("THIS_REPOSITORY")\n```\n\n'
        "The chat template that the model was trained with is the tokenizer's."
    )


def _origin(environment: Mapping[str, Any], lines: Sequence[Mapping[str, float | None]]) -> str:
    packages = environment.get("packages")
    found = [f"{name} {number}" for name, number in packages.items()] if isinstance(packages, dict) else []
    if environment.get("python"):
        found.append(f"Python {environment['python']}")
    text = "## Versions\n\n" + ", ".join(found) + "." if found else ""
    devices, size = environment.get("devices"), environment.get("world_size", 1)
    if text and isinstance(devices, list) and devices:
        seconds = sum(line.get("seconds") or 0 for line in lines)
        took = f"{seconds / 3600:.3g} hours" if seconds >= 3600 else f"{seconds / 60:.2g} minutes"
        text += f" {size} rank{'' if size == 1 else 's'} on {devices[0]}; the steps took {took}."
    return text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers to the right."""
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(markdown_rows(lines))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_setting(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
