"""Generation of answers by a model named on the command line: its defaults, loading, and one batch."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, TypeAdapter
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from vcore_ds.commands.named_model import NamedModel
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import read_json
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.models.causal_lm import load_causal_lm
from vcore_ds.models.cpu_matmul import use_fast_cpu_matmul
from vcore_ds.models.lora import add_trained_adapter
from vcore_ds.models.model_folder import find_end_tokens


class GenerationDefaults(BaseModel):
    """The fields of generation_config.json that answers depend on."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None


def read_generation_config(path: str) -> GenerationDefaults:
    """Read generation_config.json of a model in a folder or on the hub; all fields are None without one. Raises
    UserError if it is damaged."""
    file = cached_file(path, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return GenerationDefaults()
    return read_json(
        Path(file), TypeAdapter(GenerationDefaults), "the model's defaults of sampling", "Restore the file"
    )


def load_to_answer(model: NamedModel, dtype: torch.dtype | str) -> Any:
    """Load a Hugging Face model, or peft's wrapper around one with the adapter, with training's forward; on the GPU if
    there is one. `dtype`: of the weights in memory; "auto" for the stored one. Raises UserError where model or adapter
    cannot be loaded, or do not match."""
    on_gpu = uses_gpu()
    read_generation_config(model.weights)
    try:
        base = load_causal_lm(model.weights, dtype=dtype, attention="sdpa", gradient_checkpointing=False)
    except UserError as error:
        raise UserError(f"RUN|MODEL: {str(error).removeprefix('model.path: ')}") from None
    if not on_gpu:
        use_fast_cpu_matmul()
    base.config.use_cache = True
    adapter = model.adapter
    causal_lm: Any = base if adapter is None else add_trained_adapter(base, Path(adapter), model.weights)
    return causal_lm.to("cuda" if on_gpu else "cpu").eval()


def end_token_ids(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer: the model's, the tokenizer's, and those with which turns end in training, which a
    base model may lack. Raises UserError where there is none."""
    model_ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ids = {token for token in (*model_ids, tokenizer.eos_token_id, *find_end_tokens(tokenizer)) if token is not None}
    if not ids:
        raise UserError(f"{tokenizer.name_or_path}: found no end-of-sequence token; expected one in the tokenizer")
    return sorted(ids)


StopReason = Literal["stop", "max_tokens", "model_length"]
"""An end token, the limit on new tokens, or the model's maximum sequence length."""


class AnswerTokens(NamedTuple):
    """A generated answer."""

    ids: list[int]  # including the end token
    stop_reason: StopReason


def longest_sequence(model: Any) -> int:
    """The model's limit on the tokens of a prompt and its answer; `sys.maxsize` if the configuration has none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


@torch.inference_mode()
def generate_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    settings: GenerationConfig,
    **options: Any,
) -> list[AnswerTokens]:
    """Generate an answer to each prompt (token ids, shorter than `longest_sequence`), in one batch. `model`: of
    `load_to_answer`. `max_new_tokens`: limit of each answer. `settings`: sampling, end tokens (a list) and padding
    token; unset values are the model's. `options`: further arguments of `transformers.GenerationMixin.generate`, such
    as a streamer."""
    longest = longest_sequence(model)
    limits = [min(limit, longest - len(prompt)) for limit, prompt in zip(max_new_tokens, prompts, strict=True)]
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), settings.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    settings.max_new_tokens = max(limits)
    # Else the model's own, which change what is returned, and of which a damaged file has anything.
    settings.return_dict_in_generate = settings.output_hidden_states = settings.output_attentions = False
    sequences = model.generate(
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings, **options
    )
    answers = []
    for row, limit, wanted in zip(sequences[:, width:].tolist(), limits, max_new_tokens, strict=True):
        at_limit: StopReason = "max_tokens" if limit == wanted else "model_length"
        # Answers that end early are padded to the longest one.
        end = next((i for i, token in enumerate(row[:limit], start=1) if token in settings.eos_token_id), None)
        answers.append(AnswerTokens(row[:limit], at_limit) if end is None else AnswerTokens(row[:end], "stop"))
    return answers
