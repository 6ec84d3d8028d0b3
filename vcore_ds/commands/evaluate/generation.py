"""Sampling settings, and inspect's interface to a model in this process."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import anyio
import torch
from anyio import to_thread
from inspect_ai.model import ChatMessage, GenerateConfig, ModelAPI, ModelOutput, ModelUsage
from inspect_ai.tool import ToolChoice, ToolInfo
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from vcore_ds.commands.named_model import NamedModel, end_token_ids, generate_answers, load_to_answer, longest_sequence
from vcore_ds.common.errors import UserError
from vcore_ds.data.conversations import render_prompt
from vcore_ds.models.loading import DTYPES


@dataclass(frozen=True)
class Sampling:
    """All sampling fields, so that none is left to a server's defaults.

    Defaults are the paper's (table "Inference hyperparameters").
    """

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 for all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 42

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def choose_sampling(model: str, preset: str | None, changes: dict[str, Any]) -> Sampling:
    """Return the paper's or the model's sampling, changed by the values of `changes` that are not None.

    The model's is that of its generation_config.json, or greedy, and without a repetition penalty, which is meant for
    short chats and lowers accuracy.
    """
    sampling = Sampling()
    path = cached_file(model, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    if preset != "paper" and path is not None:
        with open(path, encoding="utf-8") as file:
            recommended = json.load(file)
        if recommended.get("do_sample"):
            sampling = Sampling(
                temperature=float(recommended.get("temperature") or 1.0),
                top_p=float(recommended.get("top_p") or 1.0),
                top_k=int(recommended.get("top_k") or -1),
                min_p=float(recommended.get("min_p") or 0.0),
            )
    return replace(sampling, **{name: value for name, value in changes.items() if value is not None})


def encode_prompt(question: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """Render a user's turn with the chat template, as in training; return text and tokens."""
    prompt = render_prompt([{"role": "user", "content": question}], tokenizer)
    return prompt, tokenizer(prompt, add_special_tokens=False)["input_ids"]


class Request(NamedTuple):
    """One answer to generate."""

    question: str
    seed: int
    max_new_tokens: int


class InProcessAPI(ModelAPI):
    """A model, with its adapter if any, in this process.

    Batches are fixed in advance, so that a resumed evaluation forms the same ones and gets bitwise equal answers.
    """

    def __init__(
        self,
        model: NamedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        precision: str,
        batches: Sequence[Sequence[Request]],
    ) -> None:
        """Load the model. Raises UserError where it or its adapter cannot be loaded."""
        super().__init__(model.name)
        self._model = load_to_answer(model, DTYPES[precision])
        self.device = self._model.device
        ends = end_token_ids(self._model.generation_config, tokenizer)
        self._model.generation_config = GenerationConfig()  # its fields would fill in for unset ones
        self._settings = GenerationConfig(
            eos_token_id=ends, pad_token_id=ends[0], use_cache=True, repetition_penalty=sampling.repetition_penalty
        )
        if not sampling.is_greedy:
            drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
            self._settings.update(do_sample=True, top_k=max(sampling.top_k, 0), **drawn)
        self._tokenizer = tokenizer
        self._batches = {request: batch for batch in batches for request in batch}
        self._outputs: dict[Request, ModelOutput] = {}
        self._lock = anyio.Lock()

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Answer a user message, together with its batch."""
        assert config.seed is not None and config.max_tokens is not None
        request = Request(input[0].text, config.seed, config.max_tokens)
        async with self._lock:
            if request not in self._outputs:
                batch = self._batches[request]
                self._outputs |= zip(batch, await to_thread.run_sync(self.answer, batch), strict=True)
        return self._outputs[request]

    def answer(self, requests: Sequence[Request]) -> list[ModelOutput]:
        """Answer a batch, with the first request's seed. Raises UserError where a prompt leaves no room to answer."""
        prompts = [encode_prompt(request.question, self._tokenizer)[1] for request in requests]
        longest = longest_sequence(self._model)
        if max(map(len, prompts)) >= longest:
            raise UserError(
                f"--tasks: found a prompt of {max(map(len, prompts)):,} tokens; expected fewer than {longest:,}, the "
                "model's longest sequence. Evaluate problems that fit"
            )
        torch.manual_seed(requests[0].seed)
        limits = [request.max_new_tokens for request in requests]
        outputs = []
        for prompt, answer in zip(prompts, generate_answers(self._model, prompts, limits, self._settings), strict=True):
            text = self._tokenizer.decode(answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            output = ModelOutput.from_content(self.model_name, str(text), answer.stop_reason)
            lengths = {"input_tokens": len(prompt), "output_tokens": len(answer.ids)}
            output.usage = ModelUsage(**lengths, total_tokens=sum(lengths.values()))
            outputs.append(output)
        return outputs
