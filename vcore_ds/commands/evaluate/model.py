"""What MODEL|RUN names: a model, an adapter with its base, or the result of a run."""

import json
from dataclasses import dataclass
from pathlib import Path

from vcore_ds.config import read_resolved_recipe
from vcore_ds.errors import UserError
from vcore_ds.files.user_paths import reading
from vcore_ds.models.folder_check import check_model_folder

ADAPTER_CONFIG = "adapter_config.json"
_RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class EvaluatedModel:
    """A model, and where its parts are."""

    path: str
    """As it was given."""
    base: str
    """Folder or hub id of the whole model, which an adapter is added to."""
    adapter: str | None
    """Folder of the adapter."""

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer is: an adapter may have one of its own."""
        has_own = self.adapter is not None and (Path(self.adapter) / "tokenizer_config.json").is_file()
        return self.adapter if has_own and self.adapter is not None else self.base

    @property
    def name(self) -> str:
        """A name to serve it under."""
        last = Path(self.path).resolve().name if Path(self.path).exists() else self.path.rpartition("/")[2]
        return Path(self.path).resolve().parent.name if last in ("adapter", "model") else last


def find_model(path: str, base: str | None) -> EvaluatedModel:
    """What a word names.

    Args:
        path: a run's folder, a model's folder or hub id, or an adapter's folder.
        base: the base model to use instead of the one that an adapter names.

    Raises:
        UserError: there is no such model, or no result in the run, or a base for something that has none.
    """
    folder = Path(path)
    with reading("MODEL", folder, "a model, an adapter or a run"):
        found = _find(path, folder)
    if base is not None and found.adapter is None:
        raise UserError(f"--base: {path} is a whole model; expected an adapter with it. Leave --base out")
    if base is not None:
        found = EvaluatedModel(path, base, found.adapter)
    try:
        check_model_folder(found.base)
    except UserError as error:
        hint = f". {path} is an adapter of this model: name the base with --base MODEL" if found.adapter else ""
        raise UserError(f"MODEL: {error}{hint}") from None
    return found


def _find(path: str, folder: Path) -> EvaluatedModel:
    if (folder / _RECIPE).is_file():
        recipe = read_resolved_recipe(folder / _RECIPE)
        if (folder / "adapter" / ADAPTER_CONFIG).is_file():
            return EvaluatedModel(path, recipe.model.path, str(folder / "adapter"))
        if (folder / "model" / "config.json").is_file():
            return EvaluatedModel(path, str(folder / "model"), None)
        raise UserError(
            f"MODEL: {folder}: found a run without a result (adapter/ or model/); expected a finished one. Let it "
            f"finish, or export a checkpoint (vcore-ds export {folder} --output DIR) and evaluate DIR"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_adapter_config(folder).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise UserError(f"MODEL: {folder}: {ADAPTER_CONFIG} names no base model; name it with --base MODEL")
        return EvaluatedModel(path, base, path)
    return EvaluatedModel(path, path, None)


def read_adapter_config(folder: Path) -> dict:
    """Raises UserError where it is damaged."""
    try:
        values = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
    except ValueError:
        pass
    raise UserError(f"MODEL: {folder / ADAPTER_CONFIG}: is damaged; expected peft's description of an adapter")
