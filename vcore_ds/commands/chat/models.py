"""From what the user names to models that answer: the result of a run, an adapter, a full model, and their base."""

import json
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from vcore_ds.data import load_tokenizer
from vcore_ds.data.rendering import check_tokenizer
from vcore_ds.errors import UserError, first_line
from vcore_ds.files.run_folder import RECIPE
from vcore_ds.files.user_paths import reading
from vcore_ds.models import check_model_folder
from vcore_ds.models.stored_weights import unreadable_model
from vcore_ds.track.run_reader import read_recipe_of

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, None: "auto"}
ADAPTER_CONFIG = "adapter_config.json"
_EXPECTED = "expected a run's folder, the folder of an adapter or a model, or a hub id (OWNER/NAME)"


@dataclass(frozen=True)
class FoundModel:
    """Where the parts of a model are."""

    weights: str
    """Folder or hub id of full weights."""
    adapter: Path | None
    base: str | None
    """Folder or hub id of the model before training; None where it is not known."""

    @property
    def tokenizer(self) -> str:
        return self.weights if self.adapter is None else str(self.adapter)


@dataclass(frozen=True)
class Voice:
    """A model that answers, and what it is called; several may be the same model with and without its adapter."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    during: Callable[[], AbstractContextManager] = nullcontext
    """A context in which the model is this one."""


def find_model(name: str) -> FoundModel:
    """Looks for a run, an adapter or a model, in this order; loads nothing.

    Raises:
        UserError: there is none, or the run has no result yet.
    """
    folder = Path(name).expanduser()
    with reading("RUN|MODEL", folder, "a folder that can be read"):
        is_run, is_adapter = (folder / RECIPE).is_file(), (folder / ADAPTER_CONFIG).is_file()
    if is_run:
        recipe = read_recipe_of(folder)
        result = folder / ("adapter" if recipe.lora is not None else "model")
        if not result.is_dir():
            raise UserError(
                f"RUN|MODEL: {folder}: the run has no result yet ({result.name}/); expected a finished one. Export a "
                f"checkpoint (vcore-ds export {folder}) and name the folder that this writes"
            )
        if recipe.lora is None:
            return FoundModel(str(result), None, recipe.model.path)
        return FoundModel(recipe.model.path, result, recipe.model.path)
    if is_adapter:
        base = _base_of(folder)
        return FoundModel(base, folder, base)
    try:
        check_model_folder(str(folder) if folder.is_dir() else name)
    except UserError as error:
        raise UserError(f"RUN|MODEL: {str(error).removeprefix('model.path: ')}; {_EXPECTED}") from None
    return FoundModel(str(folder) if folder.is_dir() else name, None, None)


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
        if isinstance(base, str) and base:
            return base
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"RUN|MODEL: {adapter / ADAPTER_CONFIG}: found no base_model_name_or_path; expected the base model")


def load_voices(found: FoundModel, *, with_base: bool, dtype: str | None) -> list[Voice]:
    """The models, the base first; on the GPU where there is one.

    Raises:
        UserError: something cannot be loaded, or the base is asked for and not known.
    """
    if with_base and found.base is None:
        raise UserError(f"--base: found a model without a run or an adapter ({found.weights}); expected one of these")
    logging.disable_progress_bar()
    tokenizer = load_tokenizer(found.tokenizer, "RUN|MODEL")
    check_tokenizer(tokenizer)
    model = _load(found.weights, dtype)
    if found.adapter is not None:
        return _with_adapter(model, found.adapter, tokenizer, with_base)
    tuned = Voice("tuned" if found.base is not None else "model", model, tokenizer)
    if not with_base or found.base is None:
        return [tuned]
    return [Voice("base", _load(found.base, dtype), load_tokenizer(found.base, "RUN|MODEL")), tuned]


def _with_adapter(
    model: PreTrainedModel, adapter: Path, tokenizer: PreTrainedTokenizerBase, with_base: bool
) -> list[Voice]:
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            # peft asks transformers for gradient checkpointing by the name it had before 5.23.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UserError(
            f"RUN|MODEL: {adapter}: the adapter cannot be loaded: {first_line(error)}; expected one for "
            f"{model.name_or_path}"
        ) from None
    base = [Voice("base", adapted, tokenizer, adapted.disable_adapter)] if with_base else []
    return [*base, Voice("tuned", adapted, tokenizer)]


def _load(path: str, dtype: str | None) -> PreTrainedModel:
    try:
        check_model_folder(path)
        with unreadable_model(path):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], trust_remote_code=False)
    except UserError as error:
        raise UserError(
            f"RUN|MODEL: {str(error).removeprefix('model.path: ')}. A relative path is taken from the working "
            "directory, as in training"
        ) from None
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
