"""The models that answer: what the user has named and, where it is asked for, the model before training."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from peft import PeftModel
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from vcore_ds.data.rendering import check_tokenizer
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.errors import UserError
from vcore_ds.models.loading import DTYPES
from vcore_ds.models.named_model import AnsweringModel, NamedModel, find_named_model, load_to_answer


@dataclass(frozen=True)
class Voice:
    """A model that answers, and what it is called; several may be the same model with and without its adapter."""

    name: str
    model: AnsweringModel
    tokenizer: PreTrainedTokenizerBase
    during: Callable[[], AbstractContextManager] = nullcontext
    """A context in which the model is this one."""


def load_voices(found: NamedModel, *, with_base: bool, dtype: str | None) -> list[Voice]:
    """The models, the base first; on the GPU where there is one.

    Raises:
        UserError: something cannot be loaded, or the base is asked for and not known.
    """
    if with_base and found.base is None:
        raise UserError(f"--base: found a model without a run or an adapter ({found.weights}); expected one of these")
    logging.disable_progress_bar()
    # Looked for first: loading the other one may take minutes.
    base = find_named_model(found.base) if with_base and found.base is not None else None
    tokenizer = load_tokenizer(found.tokenizer, "RUN|MODEL")
    check_tokenizer(tokenizer)
    in_memory = "auto" if dtype is None else DTYPES[dtype]
    model = load_to_answer(found, in_memory)
    tuned = Voice("tuned" if found.base is not None else "model", model, tokenizer)
    if base is None:
        return [tuned]
    if isinstance(model, PeftModel):
        return [Voice("base", model, tokenizer, model.disable_adapter), tuned]
    return [Voice("base", load_to_answer(base, in_memory), load_tokenizer(base.tokenizer, "RUN|MODEL")), tuned]
