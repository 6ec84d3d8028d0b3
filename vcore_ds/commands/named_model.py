"""Models named on the command line, as a run, an adapter or a model: where their parts are."""

import os
from dataclasses import dataclass
from pathlib import Path

from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.paths import reading
from vcore_ds.config.exports import ADAPTER_CONFIG, find_export, read_adapter_config
from vcore_ds.data.hub import check_on_hub

_EXPECTED = "expected a run's folder, the folder of an adapter or a model, or a hub id (OWNER/NAME)"
_RELATIVE = "A relative path is taken from the working directory, as in training"


@dataclass(frozen=True)
class NamedModel:
    """A model, and the places of its parts."""

    path: str  # as the user gave it
    weights: str  # folder or hub id of the model, or of the adapter's base model
    adapter: str | None = None
    base: str | None = None  # folder or hub id of the model before training; None where it is not known

    @property
    def tokenizer(self) -> str:
        """Folder or hub id of the tokenizer: an adapter's folder may hold one."""
        if self.adapter is not None and (Path(self.adapter) / "tokenizer_config.json").is_file():
            return self.adapter
        return self.weights

    @property
    def name(self) -> str:
        """A name to serve it under."""
        last = Path(self.path).resolve().name if Path(self.path).exists() else self.path.rpartition("/")[2]
        return Path(self.path).resolve().parent.name if last in ("adapter", "model") else last


def find_named_model(path: str, base: str | None = None, *, remedy: str = _RELATIVE) -> NamedModel:
    """Resolve the name of a run, an adapter or a model, in this order; loads nothing. `base` replaces the base model
    that the adapter's configuration names; `remedy` is advice where it cannot be used. Raises UserError where there is
    no such model, the run has no result, or `base` was given without an adapter."""
    path = os.path.expanduser(path)
    with reading("RUN|MODEL", Path(path), "a run, an adapter or a model"):
        model = _resolve(path, base, remedy)
    if base is not None and model.adapter is None:
        raise UserError(f"--base: {path} is a full model; expected an adapter with it. Leave --base out")
    try:
        check_on_hub(model.weights, "model", asks=False)
        with lasting_imports():  # after all that can be refused without the seconds that torch takes
            from vcore_ds.models.architecture_check import check_model_folder
            from vcore_ds.models.model_identity import check_adapter_base
        check_model_folder(model.weights)
    except UserError as error:
        hint = "" if Path(model.weights).exists() else f"; {_EXPECTED}. {_RELATIVE}"
        if model.adapter is not None:
            hint = f". It is the base model of {path}. {remedy}"
        raise UserError(f"RUN|MODEL: {str(error).removeprefix('model.path: ')}{hint}") from None
    check_on_hub(model.weights, "model", "RUN|MODEL: ")
    if model.adapter is not None and base is None:  # one that is named may be stored in other files
        check_adapter_base(Path(model.adapter), model.weights, "RUN|MODEL")
    return model


def _resolve(path: str, base: str | None, remedy: str) -> NamedModel:
    folder = Path(path)
    if (found := find_export(path, "RUN|MODEL", "trained")) is not None:
        result, recipe = found
        base = base or recipe["model"]["path"]
        is_adapter = recipe["lora"] is not None
        return NamedModel(path, base if is_adapter else str(result), str(result) if is_adapter else None, base)
    if (folder / ADAPTER_CONFIG).is_file():
        base = base or read_adapter_config(folder).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise UserError(
                f"RUN|MODEL: {folder / ADAPTER_CONFIG}: found no base_model_name_or_path; expected the base model. "
                f"{remedy}"
            )
        return NamedModel(path, base, path, base)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"RUN|MODEL: {folder}: found no run, adapter or model there; {_EXPECTED}")
    return NamedModel(path, path)
