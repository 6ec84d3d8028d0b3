"""Where runs keep exported weights, and what a recipe takes from the adapter that it goes on training."""

import math
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, PositiveInt, TypeAdapter

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import compute_file_digest, read_json, reading
from vcore_ds.common.text import shorten
from vcore_ds.config.schema import iter_values

RECIPE, CARD, ADAPTER_CONFIG = "recipe.yaml", "README.md", "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""File names: of a run, of exported folders, and of adapters in peft's format."""

_WITHOUT_EFFECT = set(
    "auto_mapping exclude_modules fan_in_fan_out inference_mode layers_pattern lora_dropout megatron_core peft_version "
    "qalora_group_size revision task_type".split()
)
"""Fields of adapter_config.json that do not change what a trained adapter of known layers computes."""

_VALUES: dict[str, list] = {
    "peft_type": ["LORA"],
    "bias": ["none"],
    "init_lora_weights": [True, "gaussian", "orthogonal", "eva"],
}
"""Values of other fields, beside null, false and empty ones, that a recipe implies."""


def find_export(path: str, key: str, kind: str) -> tuple[Path, dict[str, Any]] | None:
    """Find the exported weights of a run or of one of its checkpoints, and the recipe of the run; None for other paths.
    `kind`: `trained`, what the run trained; `model`, all weights, merged for a LoRA run; or `adapter`. `key` begins
    messages. Raises UserError, with the command that exports them, if there are none, or only earlier ones."""
    folder = Path(path)
    is_checkpoint = folder.parent.name == "checkpoints"
    run = folder.parents[1] if is_checkpoint else folder
    with reading(key, folder, "a run, a checkpoint, a model or an adapter"):
        # False without permission to read the folder, which loading the model reports.
        if not os.path.isfile(run / RECIPE) or os.path.isfile(folder / "config.json"):
            return None
        try:
            recipe = yaml.safe_load((run / RECIPE).read_text(encoding="utf-8"))
            has_adapter = recipe["lora"] is not None
            if has_adapter and not recipe["lora"].keys() >= {"rank", "alpha", "target_modules"}:
                raise KeyError
            os.fspath(recipe["model"]["path"])
        except (yaml.YAMLError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise UserError(f"{key}: {run / RECIPE}: is damaged; expected the recipe of a run") from None
        if kind == "adapter" and not has_adapter:
            raise UserError(f"{key}: {path}: is a run that trained all parameters; expected one that trained adapters")
        name = "model" if not has_adapter else "merged" if kind == "model" else "adapter"
        if not is_checkpoint and (run / name).is_dir():
            return run / name, recipe
        options = " --merge" * (name == "merged") + f" --checkpoint {folder.name}" * is_checkpoint
        if not is_checkpoint:
            marks = [mark for mark in run.glob("checkpoints/step_*/COMPLETE") if mark.parent.name[5:].isdigit()]
            folder = max((mark.parent for mark in marks), key=lambda one: int(one.name[5:]), default=run / "adapter")
        export, mark = run / "export" / folder.name / name, folder / "COMPLETE"
        digest = mark.read_text(encoding="utf-8").strip() if mark.is_file() else ""
        if not is_checkpoint and (folder / ADAPTER_WEIGHTS).is_file():  # the checkpoints were removed
            digest = compute_file_digest(folder / ADAPTER_WEIGHTS)
        if is_checkpoint and not digest and export.is_dir():
            raise UserError(
                f"{key}: {path}: found no finished checkpoint with which its export could be compared; expected one. "
                f"Name the export itself to take it as it is: {export}"
            )
        card = (export / CARD).read_text(encoding="utf-8") if digest and (export / CARD).is_file() else ""
        if not digest or digest not in card:
            raise UserError(
                f"{key}: {path}: found no export of its present weights in {export}; expected what `vcore-ds export "
                f"{shlex.quote(str(run))}{options}` writes there (remove an older one)"
            )
    return export, recipe


class _AdapterConfig(BaseModel, extra="allow"):
    """The fields of adapter_config.json that are read here."""

    base_model_name_or_path: str | None = None
    r: PositiveInt | None = None
    lora_alpha: int | float | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read the adapter_config.json of an adapter. Raises UserError if it cannot be read."""
    contents = TypeAdapter(_AdapterConfig)
    read = read_json(folder / ADAPTER_CONFIG, contents, "peft's description of an adapter", "Restore the file")
    return read.model_dump(exclude_unset=True)


def describe_adapter(folder: Path) -> dict[str, Any]:
    """Describe an adapter in peft's format by the keys of a recipe: `lora.rank`, `lora.alpha`, `lora.target_modules`,
    and its base model, `model.path`. Raises UserError, with the field of adapter_config.json, where it is no adapter
    that a recipe can describe."""
    config = read_adapter_config(folder)
    modules, parameters = config.pop("target_modules", None) or [], config.pop("target_parameters", None) or []
    rank, alpha, base = (config.pop(name, None) for name in ("r", "lora_alpha", "base_model_name_or_path"))
    if config.pop("use_rslora", False) and rank and alpha:
        alpha *= math.sqrt(rank)
    unknown = {name: value for name, value in config.items() if value and value not in _VALUES.get(name, ())}
    unknown |= {"target_modules": modules} if isinstance(modules, str) else {}
    for name in unknown.keys() - _WITHOUT_EFFECT:
        raise UserError(
            f"lora.adapter: {folder / ADAPTER_CONFIG}: {name}: found {shorten(str(unknown[name]))}; expected a LoRA "
            "adapter of rank, alpha and a list of layers alone. Merge it into its base model with peft, and name the "
            "result in model.path"
        )
    layers = [*modules, *(name.removesuffix(".weight") for name in parameters if name.endswith(".weight"))]
    experts = ["experts"] if any(not name.endswith(".weight") for name in parameters) else []
    return {"lora.rank": rank, "lora.alpha": alpha, "lora.target_modules": [*layers, *experts], "model.path": base}


def resolve_exports(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Replace a run or a checkpoint in model.path and lora.adapter by the folder of its exported weights, and add what
    only the adapter says to the values of a recipe, in place. Yields (key, message) where that is impossible."""
    for section, name, kind in (("model", "path", "model"), ("lora", "adapter", "adapter")):
        part, stored = values.get(section), dict[str, Any]()
        if not isinstance(part, dict) or not isinstance(part.get(name), str):
            continue  # null, or reported by the validation
        written = os.path.expanduser(part[name])
        try:
            if found := find_export(written, f"{section}.{name}", kind):
                part[name], stored = str(found[0]), dict(iter_values(found[1]))
            # A resolved recipe says all of it, and its adapter may be gone.
            elif kind == "adapter" and (os.path.exists(written) or not part.keys() >= {"rank", "alpha"}):
                stored = describe_adapter(Path(written))
        except UserError as error:
            yield f"{section}.{name}", str(error)
        if kind == "adapter" and stored:
            values["model"].setdefault("path", stored["model.path"])
            # Compared with the adapter's layers when its weights are read.
            part.setdefault("target_modules", stored["lora.target_modules"])
            for key in ("lora.rank", "lora.alpha"):
                if (value := part.setdefault(key[5:], stored[key])) != stored[key]:
                    yield key, f"{key}: found {value}; expected {stored[key]}, as lora.adapter has (or no such key)"
