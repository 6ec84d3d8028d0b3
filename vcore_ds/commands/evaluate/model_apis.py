"""Sampling settings, and the models that inspect asks: in this process, or on an OpenAI-compatible server."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import anyio
import httpx
import torch
from anyio import to_thread
from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    Model,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    get_model,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from vcore_ds.commands.named_model import NamedModel, end_token_ids, generate_answers, load_to_answer, longest_sequence
from vcore_ds.common.errors import UserError, first_line
from vcore_ds.models.loading import DTYPES

MAX_RETRIES = 4
TOKENS = "prompt_token_ids"  # metadata of a message from which inspect's providers of completions take the prompt
REQUEST_SECONDS = 3_600.0  # timeout of one answer: tens of thousands of tokens on a busy GPU take many minutes


@dataclass(frozen=True)
class Sampling:
    """All sampling fields, so that none is left to a server's defaults. Defaults are the paper's (table "Inference
    hyperparameters")."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 for all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 42

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def for_transformers(self, end_ids: list[int]) -> dict[str, Any]:
        """These settings as fields of transformers' GenerationConfig, which takes no temperature of 0."""
        fields = asdict(self) | {"top_k": max(self.top_k, 0), "do_sample": True}
        del fields["seed"]
        if self.is_greedy:
            fields = {"do_sample": False, "repetition_penalty": self.repetition_penalty}
        return {**fields, "eos_token_id": end_ids, "pad_token_id": end_ids[0]}


def choose_sampling(model: str, preset: str | None, changes: dict[str, Any]) -> Sampling:
    """The paper's or the model's sampling, changed by the values of `changes` that are not None. The model's is that of
    generation_config.json, or greedy, without its repetition penalty, which is meant for short chats and lowers
    accuracy."""
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


class Request(NamedTuple):
    """One answer to generate."""

    prompt: tuple[int, ...]
    seed: int
    max_new_tokens: int


class InProcessAPI(ModelAPI):
    """A model, with its adapter if any, in this process. Batches are fixed in advance, so that a resumed evaluation
    forms the same ones and gets bitwise equal answers."""

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
        end_ids = end_token_ids(self._model.generation_config, tokenizer)
        self._model.generation_config = GenerationConfig()  # its fields would fill in for unset ones
        self._settings = GenerationConfig(use_cache=True, **sampling.for_transformers(end_ids))
        self._tokenizer = tokenizer
        self._batches = {request: batch for batch in batches for request in batch}
        self._outputs: dict[Request, ModelOutput] = {}
        self._lock = anyio.Lock()

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        assert input[0].metadata is not None and config.seed is not None and config.max_tokens is not None
        request = Request(tuple(input[0].metadata[TOKENS]), config.seed, config.max_tokens)
        async with self._lock:
            if request not in self._outputs:
                batch = self._batches[request]
                self._outputs |= zip(batch, await to_thread.run_sync(self.answer, batch), strict=True)
        return self._outputs[request]

    def answer(self, requests: Sequence[Request]) -> list[ModelOutput]:
        """Answer a batch, with the first request's seed. Raises UserError where a prompt leaves no room to answer."""
        prompts = [request.prompt for request in requests]
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

    def as_model(self, config: GenerateConfig) -> Model:
        # inspect registers classes, but takes any callable that returns an instance.
        return Model(modelapi(name="vcore_ds")(lambda: lambda: self)(), config)  # type: ignore[call-arg]


class Server(NamedTuple):
    """The model on an OpenAI-compatible server."""

    url: str
    name: str  # of the model there
    is_transformers: bool  # `transformers serve` takes text only, and refuses fields that it does not know
    end_ids: list[int]

    def as_model(self, config: GenerateConfig) -> Model:
        return get_model(
            f"openai-api-completions/vcore/{self.name}",
            config=config,
            base_url=self.url,
            api_key=os.environ.get("OPENAI_API_KEY") or "none",  # any text, for servers that need none
            memoize=False,
            client_timeout=REQUEST_SECONDS,
            max_retries=0,  # of the client; inspect retries
        )

    def extra_body(self, sampling: Sampling, max_new_tokens: int) -> dict[str, Any]:
        """Return the sampling fields that OpenAI's API lacks, under this server's names."""
        if self.is_transformers:
            settings = {**sampling.for_transformers(self.end_ids), "max_new_tokens": max_new_tokens}
            return {"generation_config": json.dumps(settings)}
        drawn = {name: getattr(sampling, name) for name in ("top_k", "min_p", "repetition_penalty")}
        return {**drawn, "stop_token_ids": self.end_ids}


def find_server(url: str, served_name: str | None, model: NamedModel, tokenizer: PreTrainedTokenizerBase) -> Server:
    """Raises UserError where the server cannot be reached, or an adapter's name there is not given: its only model may
    be the base."""
    if served_name is None and model.adapter is not None:
        raise UserError(
            f"--url: found the adapter {model.adapter} without a name; expected --served-name NAME, as in vllm serve "
            f"BASE --enable-lora --lora-modules NAME={model.adapter}"
        )
    url = url.rstrip("/")
    try:
        described = httpx.get(f"{url.removesuffix('/v1')}/openapi.json", timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"--url: {url}: cannot be reached ({first_line(error)}); expected an OpenAI-compatible server. Start one "
            "(docs/evaluation.md shows how), and wait until it is ready"
        ) from None
    try:
        settings = GenerationConfig.from_pretrained(model.weights)
    except OSError:
        settings = GenerationConfig()
    return Server(url, served_name or model.path, "/load_model" in described.text, end_token_ids(settings, tokenizer))
