"""A model as a user names it, a run's result, an adapter or a whole model: found, and loaded to answer prompts."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from peft.utils import CONFIG_NAME
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from vcore_ds.config.resume import read_resolved_recipe
from vcore_ds.cpu_products import use_fast_cpu_products
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.errors import UserError
from vcore_ds.files.run_folder import RECIPE, export_folder
from vcore_ds.files.user_paths import reading
from vcore_ds.models.folder_check import check_model_folder
from vcore_ds.models.loading import load_causal_lm
from vcore_ds.models.trained_adapter import add_trained_adapter

_EXPECTED = "expected a run's folder, the folder of an adapter or a model, or a hub id (OWNER/NAME)"
_RELATIVE = "A relative path is taken from the working directory, as in training"


@dataclass(frozen=True)
class NamedModel:
    """A model, and where its parts are."""

    path: str
    """As it was given."""
    weights: str
    """Folder or hub id of the whole model, which an adapter is added to."""
    adapter: str | None = None
    """Folder of the adapter."""
    base: str | None = None
    """Folder or hub id of the model before training; None where it is not known."""

    @property
    def tokenizer(self) -> str:
        """Folder or hub id of the tokenizer: an adapter may have one of its own."""
        if self.adapter is not None and (Path(self.adapter) / "tokenizer_config.json").is_file():
            return self.adapter
        return self.weights

    @property
    def name(self) -> str:
        """A name to serve it under."""
        last = Path(self.path).resolve().name if Path(self.path).exists() else self.path.rpartition("/")[2]
        return Path(self.path).resolve().parent.name if last in ("adapter", "model") else last


def find_named_model(path: str, base: str | None = None, *, remedy: str = _RELATIVE) -> NamedModel:
    """Looks for a run, an adapter or a model, in this order; loads nothing.

    Args:
        path: folder of a run, an adapter or a model, or a model's hub id.
        base: the base model to use instead of the one that an adapter names.
        remedy: what to do where an adapter's base model cannot be used, for messages.

    Raises:
        UserError: there is no such model, or no result in the run, or a base for something that has none.
    """
    path = os.path.expanduser(path)
    with reading("RUN|MODEL", Path(path), "a run, an adapter or a model"):
        found = _find(path, base, remedy)
    if base is not None and found.adapter is None:
        raise UserError(f"--base: {path} is a whole model; expected an adapter with it. Leave --base out")
    try:
        check_model_folder(found.weights)
    except UserError as error:
        hint = "" if Path(found.weights).exists() else f"; {_EXPECTED}. {_RELATIVE}"
        if found.adapter is not None:
            hint = f". It is the base model of {path}. {remedy}"
        raise UserError(f"RUN|MODEL: {str(error).removeprefix('model.path: ')}{hint}") from None
    return found


def _find(path: str, base: str | None, remedy: str) -> NamedModel:
    folder = Path(path)
    if (folder / RECIPE).is_file():
        recipe = read_resolved_recipe(folder / RECIPE, accept_retired=True)
        result = export_folder(folder, is_adapter=recipe.lora is not None)
        if not result.is_dir():
            raise UserError(
                f"RUN|MODEL: {folder}: the run has no result yet ({result.name}/); expected a finished one. Export a "
                f"checkpoint (vcore-ds export {folder}) and name the folder that this writes"
            )
        if recipe.lora is None:
            return NamedModel(path, str(result), None, recipe.model.path)
        base = base or recipe.model.path
        return NamedModel(path, base, str(result), base)
    if (folder / CONFIG_NAME).is_file():
        base = base or read_adapter_config(path).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise UserError(
                f"RUN|MODEL: {folder / CONFIG_NAME}: found no base_model_name_or_path; expected the base model. "
                f"{remedy}"
            )
        return NamedModel(path, base, path, base)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"RUN|MODEL: {folder}: found no run, adapter or model there; {_EXPECTED}")
    return NamedModel(path, path)


def read_adapter_config(adapter: str) -> dict:
    """peft's description of the adapter in a folder. Raises UserError where it is damaged."""
    file = Path(adapter) / CONFIG_NAME
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
    except (ValueError, RecursionError):
        pass
    raise UserError(f"RUN|MODEL: {file}: is damaged; expected peft's description of an adapter")


class AnsweringModel(Protocol):
    """What generates: a model of Hugging Face, or peft's around one."""

    config: PretrainedConfig
    generation_config: GenerationConfig

    @property
    def device(self) -> torch.device: ...

    def generate(self, **options: Any) -> torch.Tensor:
        """int64 `[b, t]`, prompts with their answers, padded; options as of `transformers.GenerationMixin`."""
        ...


def load_to_answer(model: NamedModel, dtype: torch.dtype | str) -> AnsweringModel:
    """The model with its adapter, where it has one, and the forward of training; on the GPU where there is one.

    Args:
        dtype: of the weights in memory; "auto" for the one that they are stored in.

    Raises:
        UserError: the model or its adapter cannot be loaded, or they do not fit together.
    """
    try:
        base = load_causal_lm(model.weights, dtype=dtype, attention="sdpa", gradient_checkpointing=False)
    except UserError as error:
        raise UserError(f"RUN|MODEL: {str(error).removeprefix('model.path: ')}") from None
    if not uses_gpu():
        use_fast_cpu_products()
    base.config.use_cache = True
    causal_lm: nn.Module = base
    if model.adapter is not None:
        causal_lm = add_trained_adapter(base, Path(model.adapter), model.weights)
    return cast(AnsweringModel, causal_lm.to("cuda" if uses_gpu() else "cpu").eval())


def end_token_ids(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer: the model's own, and the end of a turn, which a base model may not have.

    Raises:
        UserError: there is none.
    """
    found = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ids = {token for token in (*found, tokenizer.eos_token_id) if token is not None}
    if not ids:
        raise UserError(f"{tokenizer.name_or_path}: found no end-of-sequence token; expected one in the tokenizer")
    return sorted(ids)
