"""Answers of a model in this process: a batch of prompts in, the answers' tokens out, each with why it ended."""

import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from transformers import GenerationConfig

from vcore_ds.models.named_model import AnsweringModel

StopReason = Literal["stop", "max_tokens", "model_length"]
"""The model's own end token, the limit on new tokens, or the model's longest sequence."""


class AnswerTokens(NamedTuple):
    """What a model answered."""

    ids: list[int]
    """The end token included."""
    stop_reason: StopReason


def longest_sequence(model: AnsweringModel) -> int:
    """Tokens of a prompt and its answer that the model takes, as far as its configuration says."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


@torch.inference_mode()
def generate_answers(
    model: AnsweringModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    settings: GenerationConfig,
    **options: Any,
) -> list[AnswerTokens]:
    """An answer to each prompt, all in one batch.

    Args:
        prompts: token ids, of each prompt fewer than `longest_sequence`.
        max_new_tokens: limit of each answer.
        settings: how tokens are drawn, which ones end an answer (a list), and which one pads. What it leaves open is as
            in the model's own settings. Its limit on new tokens is set here.
        options: others of `transformers.GenerationMixin.generate`, such as a streamer.
    """
    longest = longest_sequence(model)
    limits = [min(limit, longest - len(prompt)) for limit, prompt in zip(max_new_tokens, prompts, strict=True)]
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), settings.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    settings.max_new_tokens = max(limits)
    whole = model.generate(
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings, **options
    )
    answers = []
    for row, limit, wanted in zip(whole[:, width:].tolist(), limits, max_new_tokens, strict=True):
        at_limit: StopReason = "max_tokens" if limit == wanted else "model_length"
        # Rows that end early are padded to the length of the others.
        end = next((i for i, token in enumerate(row[:limit], start=1) if token in settings.eos_token_id), None)
        answers.append(AnswerTokens(row[:limit], at_limit) if end is None else AnswerTokens(row[:end], "stop"))
    return answers
