"""The model card (README.md) of a result.

Everything is read from the run's folder, so a later export has the same card. It shows only the last names of local
files and folders.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from vcore_ds.common.errors import UserError
from vcore_ds.config.files import dump_yaml
from vcore_ds.config.schema import Recipe
from vcore_ds.models.model_identity import CARD_TAG, BaseModel, identify_base_model, is_hub_id
from vcore_ds.training import run_folder
from vcore_ds.training.evaluation_folder import read_evaluation

METHODS = {
    "vcore": "VCORE",
    "sft": "SFT",
    "dft": "DFT",
    "asft": "ASFT",
    "eaft": "EAFT",
    "deft": "DEFT",
    "profit": "ProFit",
    "iw_sft": "iw-SFT",
    "random": "random masking",
    "stored": "SFT with stored token weights",
}
Kind = Literal["adapter", "model", "merged"]


def make_model_card(
    run: Path,
    recipe: Recipe,
    kind: Kind,
    *,
    step: int | None = None,
    base: BaseModel | None = None,
    evaluations: Sequence[Path] = (),
    checkpoint: str | None = None,
) -> str:
    """Return the text of the card, with the hub's metadata. `step`: of the exported checkpoint; None for the end of the
    run. `base`: None to identify it by model.path. `evaluations`: their folders. `checkpoint`: digest of the exported
    checkpoint. Raises UserError if a file of the run or of an evaluation is damaged."""
    base = base or identify_base_model(recipe.model.path)
    try:
        lines = run_folder.read_run_metrics(run)
    except UserError:  # removed or damaged, and optional for the card
        lines = []
    is_early = step is not None and not (lines and lines[-1]["step"] == step)
    lines = [line for line in lines if step is None or (line["step"] or 0) <= step]
    counts = run_folder.read_data_counts(run)
    results = [item for path in evaluations for item in read_evaluation(path, "--evaluation").tasks.items()]
    method = METHODS[recipe.method.name]
    title = f"{base.name}, fine-tuned with {method} ({'all parameters' if recipe.lora is None else 'LoRA'})"
    license_keys: dict[str, Any] = dict(base.license)
    metadata = ModelCardData(
        base_model=base.hub_id,
        base_model_relation=None if base.hub_id is None else "adapter" if kind == "adapter" else "finetune",
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        datasets=sorted({name for entry in counts for name in entry.hub_ids}) or None,
        tags=[CARD_TAG, recipe.method.name, *(["lora"] if recipe.lora is not None else [])],
        eval_results=[
            EvalResult("text-generation", name, name, "accuracy", round(task.accuracy, 4)) for name, task in results
        ]
        or None,
        model_name=title if results else None,
        checkpoint=checkpoint,
        **license_keys,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("model_card.md")),
        kind=kind,
        step=step,
        recipe=recipe,
        base=base,
        title=title,
        method=method,
        is_early=is_early,
        lines=lines,
        counts=counts,
        held_out=run_folder.HeldOutLosses({}, {}) if is_early else run_folder.read_held_out_losses(run),
        results=results,
        environment=run_folder.read_environment(run),
        recipe_yaml=dump_yaml(_dump_public_recipe(recipe, base)).strip(),
        shorten=_shorten,
        number=lambda value: "-" if value is None else f"{value:.4f}",
        total=lambda key: sum(line.get(key) or 0 for line in lines),
    )
    return f"{card}\n"


def _dump_public_recipe(recipe: Recipe, base: BaseModel) -> dict[str, Any]:
    """Dump the recipe by section and key, without paths."""
    values = recipe.model_dump(mode="json")
    values |= {section: _shorten(values[section]) for section in ("data", "run", "engine")}
    values["model"]["path"] = base.public_name
    return values


def _shorten(value: Any) -> Any:
    """Replace the paths in a value by their last names; hub ids stay."""
    if isinstance(value, dict):
        return {name: _shorten(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shorten(inner) for inner in value]
    if not isinstance(value, str):
        return value
    is_local = Path(value).expanduser().exists() or Path(value).suffix in (".jsonl", ".json", ".parquet")
    return value if is_hub_id(value) and not is_local else value.rstrip("/").rpartition("/")[2]
