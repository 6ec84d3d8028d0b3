"""A recipe for others to read: every value, and no path of the machine that it ran on."""

from pathlib import Path
from typing import Any

from vcore_ds.config.schema import Recipe
from vcore_ds.files.base_model import BaseModel, is_hub_id


def public_recipe(recipe: Recipe, base: BaseModel) -> dict[str, Any]:
    """The resolved recipe by section and key; folders and files by their last name, hub ids as they are."""
    values = recipe.model_dump(mode="json")
    values["model"]["path"] = base.public_name
    data = values["data"]
    for key in ("train_path", "probe_path", "reference_log_probabilities"):
        data[key] = None if data[key] is None else public_source(data[key])
    if data["keep"] is not None:
        data["keep"]["scores"] = _last_name(data["keep"]["scores"])
    if isinstance(data["validation_path"], dict):
        data["validation_path"] = {name: public_source(path) for name, path in data["validation_path"].items()}
    elif data["validation_path"] is not None:
        data["validation_path"] = public_source(data["validation_path"])
    data["cache_dir"] = None
    values["run"]["output_dir"] = _last_name(values["run"]["output_dir"])
    deepspeed = values["engine"]["deepspeed_config"]
    values["engine"]["deepspeed_config"] = _last_name(deepspeed) if Path(deepspeed).is_absolute() else deepspeed
    return values


def public_source(path: str) -> str:
    """A hub id as it is, of files and folders the last name."""
    is_local = Path(path).expanduser().exists() or Path(path).suffix in (".jsonl", ".json", ".parquet")
    return path if is_hub_id(path) and not is_local else _last_name(path)


def _last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
