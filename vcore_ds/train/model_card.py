"""The card of a result (README.md): what was trained from what, on how much data, how, and what came of it.

Everything is read from the run's folder, so a result that is exported later has the same card. No path of the machine
is in it: hub ids stay, and of local files and folders the last name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from vcore_ds.common.errors import UserError
from vcore_ds.config.files import dump_yaml
from vcore_ds.config.schema import Recipe
from vcore_ds.models.model_identity import OWN_TAG, BaseModel, identify_base_model, is_hub_id
from vcore_ds.train.evaluation_folder import read_evaluation
from vcore_ds.train.run_folder import read_data_counts, read_environment
from vcore_ds.train.run_reader import HeldOutLosses, read_held_out_losses, read_metrics_of

METHODS = {"vcore": "VCORE", "sft": "SFT", "dft": "DFT", "iw_sft": "iw-SFT", "random": "random masking"}
_TEMPLATE = Path(__file__).with_name("model_card.md")
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
    base = request.base or identify_base_model(recipe.model.path)
    try:
        lines = read_metrics_of(folder)
    except UserError:  # removed, or damaged: no reason to have no result
        lines = []
    is_early = request.step is not None and not (lines and lines[-1]["step"] == request.step)
    lines = [line for line in lines if request.step is None or (line["step"] or 0) <= request.step]
    counts = read_data_counts(folder)
    evaluations = [one for path in request.evaluations for one in read_evaluation(path, "--evaluation").tasks.items()]
    method = METHODS[recipe.method.name]
    title = f"{base.name}, fine-tuned with {method} ({'all parameters' if recipe.lora is None else 'LoRA'})"
    accuracies = [
        EvalResult("text-generation", name, name, "accuracy", round(one.accuracy, 4)) for name, one in evaluations
    ]
    license_keys: dict[str, Any] = dict(base.license)
    metadata = ModelCardData(
        base_model=base.hub_id,
        base_model_relation=None if base.hub_id is None else "adapter" if request.kind == "adapter" else "finetune",
        library_name="peft" if request.kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        datasets=sorted({name for one in counts for name in one.hub_ids}) or None,
        tags=[OWN_TAG, recipe.method.name, *(["lora"] if recipe.lora is not None else [])],
        eval_results=accuracies or None,
        model_name=title if accuracies else None,
        **license_keys,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATE),
        request=request,
        recipe=recipe,
        base=base,
        title=title,
        method=method,
        is_early=is_early,
        lines=lines,
        counts=counts,
        held_out=HeldOutLosses({}, {}) if is_early else read_held_out_losses(folder),
        evaluations=evaluations,
        environment=read_environment(folder),
        recipe_yaml=dump_yaml(_public_recipe(recipe, base)).strip(),
        public_source=public_source,
        number=lambda value: "-" if value is None else f"{value:.4f}",
        total=lambda key: sum(line.get(key) or 0 for line in lines),
    )
    return f"{card}\n"


def _public_recipe(recipe: Recipe, base: BaseModel) -> dict[str, Any]:
    """The resolved recipe by section and key, with the keys that only earlier versions have, and without paths."""

    def public(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: public(inner) for name, inner in value.items()}
        return public_source(value) if isinstance(value, str) else value

    values = recipe.model_dump(mode="json")
    for key, value in recipe.retired.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    paths = {section: public(values[section]) for section in ("data", "run", "engine")}
    return values | paths | {"model": values["model"] | {"path": base.public_name}}


def public_source(path: str) -> str:
    """A hub id as it is, of files and folders the last name."""
    is_local = Path(path).expanduser().exists() or Path(path).suffix in (".jsonl", ".json", ".parquet")
    return path if is_hub_id(path) and not is_local else path.rstrip("/").rpartition("/")[2]
