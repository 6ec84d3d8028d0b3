"""Sampling settings, and inspect's interfaces to a model: in this process, and on an OpenAI-compatible server that is
checked to serve this model with these prompts."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import torch
from anyio import to_thread
from inspect_ai.model import ChatMessage, ChatMessageUser, GenerateConfig, ModelAPI, ModelOutput, ModelUsage
from inspect_ai.model._model_call import ModelCall
from inspect_ai.model._providers.openai_compatible_completions import OpenAICompatibleCompletionsAPI
from inspect_ai.tool import ToolChoice, ToolInfo
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from vcore_ds.commands.named_model import NamedModel, end_token_ids, generate_answers, load_to_answer, longest_sequence
from vcore_ds.common.errors import UserError, first_line
from vcore_ds.data.conversations import render_prompt
from vcore_ds.models.loading import DTYPES


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
        ends, penalty = end_token_ids(self._model.generation_config, tokenizer), sampling.repetition_penalty
        self._model.generation_config = GenerationConfig()  # its fields would fill in for unset ones
        self._settings = GenerationConfig(
            eos_token_id=ends, pad_token_id=ends[0], use_cache=True, repetition_penalty=penalty
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


REQUEST_SECONDS = 3_600.0  # timeout of one answer: tens of thousands of tokens on a busy GPU take many minutes


class ServerAPI(OpenAICompatibleCompletionsAPI):
    """A server, which is sent prompts as tokens and every sampling field."""

    def __init__(
        self,
        url: str,
        served_name: str | None,
        model: NamedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
    ) -> None:
        """`served_name`: None for the only model there, or the path. Raises UserError where the server does not serve
        this model."""
        url = url.rstrip("/")
        data = (_get(f"{url}/models") or {}).get("data")
        entries = {entry["id"]: entry for entry in data} if isinstance(data, list) else {}
        # A given name is not checked: `transformers serve` serves folders that it does not list.
        name = served_name or (model.path if model.path in entries or len(entries) != 1 else next(iter(entries)))
        if not served_name and name not in entries:
            raise UserError(
                f"--url: {url}: found the models {', '.join(entries) or 'none'}; expected one of them for {name}. Give "
                "the base URL of an OpenAI-compatible API (it usually ends in /v1), and the model's --served-name"
            )
        super().__init__(
            model_name=name,
            base_url=url,
            api_key=_api_key(),
            service="vcore",
            client_timeout=REQUEST_SECONDS,
            max_retries=0,  # of the client; inspect retries
        )
        self.software, self.version = _identify_software(url.removesuffix("/v1"))
        if model.adapter is not None:
            self._check_adapter(entries.get(name, {}).get("parent"), model)
        try:
            settings = GenerationConfig.from_pretrained(model.weights)
        except OSError:
            settings = GenerationConfig()
        self._end_ids = end_token_ids(settings, tokenizer)
        self._tokenizer, self._sampling = tokenizer, sampling

    def service_model_name(self) -> str:
        return self.model_name

    def _check_adapter(self, parent: str | None, model: NamedModel) -> None:
        """Raise UserError where the server reports no adapter, or one on another base (`parent`)."""
        if self.software == "transformers":
            raise UserError(
                f"--url: {self.base_url}: `transformers serve` cannot serve adapters; expected vLLM or SGLang for "
                f"{model.adapter}. Evaluate it without --url, or export the merged model (vcore-ds export RUN --merge)"
            )
        if (parent is None and self.software == "vllm") or (parent and Path(parent).name != Path(model.weights).name):
            raise UserError(
                f"--url: {self.base_url}: found {self.model_name} {f'on {parent}' if parent else 'without adapter'}; "
                f"expected the adapter {model.adapter} on {model.weights}. Serve it with --enable-lora --lora-modules "
                f"{model.name}={model.adapter}, and give --served-name {model.name}"
            )

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """Raises UserError where the server counts other prompt tokens, or reports no finish reason or usage."""
        prompt, ids = encode_prompt(input[0].text, self._tokenizer)
        metadata = {"prompt_token_ids": ids} if self.software != "transformers" else None  # which takes text only
        config = config.model_copy(update={"extra_body": self._extra_body(config.max_tokens)})
        message = ChatMessageUser(content=prompt, metadata=metadata)
        answer = await super().generate([message], tools, tool_choice, config)
        output = answer[0] if isinstance(answer, tuple) else answer
        if isinstance(output, Exception):
            raise output
        usage, reason = output.usage, output.stop_reason
        if usage is None or reason not in ("stop", "max_tokens", "model_length"):
            raise UserError(
                f"--url: {self.base_url}: found an answer with finish reason {reason} and usage {usage}; expected "
                "`stop` or `length`, and the number of tokens. Use another server"
            )
        if usage.input_tokens != len(ids):
            raise UserError(
                f"--url: {self.base_url}: found a prompt of {usage.input_tokens} tokens there, {len(ids)} here; "
                "expected the same prompt as in training. Serve the very model that RUN|MODEL names, with its tokenizer"
            )
        return answer

    def _extra_body(self, max_new_tokens: int | None) -> dict[str, Any]:
        """Return the sampling fields that OpenAI's API lacks, under this server's names."""
        sampling = self._sampling
        drawn: dict[str, Any] = {"top_k": sampling.top_k, "min_p": sampling.min_p}
        if self.software != "transformers":
            return {**drawn, "repetition_penalty": sampling.repetition_penalty, "stop_token_ids": self._end_ids}
        settings = {"eos_token_id": self._end_ids, "pad_token_id": self._end_ids[0], "max_new_tokens": max_new_tokens}
        settings |= {"do_sample": not sampling.is_greedy, "repetition_penalty": sampling.repetition_penalty}
        if not sampling.is_greedy:
            drawn |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": max(sampling.top_k, 0)}
            settings |= drawn
        return {"generation_config": json.dumps(settings)}


def _identify_software(root: str) -> tuple[str, str | None]:
    """Return `vllm`, `sglang`, `transformers` or `unknown`, by an endpoint that no other has, and the version."""
    for software, path in (("vllm", "/version"), ("sglang", "/get_server_info")):
        if (answer := _get(root + path)) and "version" in answer:
            return software, str(answer["version"])
    is_transformers = "/load_model" in (_get(root + "/openapi.json") or {}).get("paths", ())
    return "transformers" if is_transformers else "unknown", None


def _get(url: str) -> dict[str, Any] | None:
    """Return the JSON object at a URL; None for any other answer. Raises UserError where it cannot be reached."""
    try:
        answer = httpx.get(url, headers={"Authorization": f"Bearer {_api_key()}"}, timeout=10.0)
        value = answer.json() if answer.status_code == 200 else None
        return value if isinstance(value, dict) else None
    except ValueError:
        return None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"--url: {url}: cannot be reached ({first_line(error)}); expected an OpenAI-compatible server. Start one "
            "(docs/evaluation.md shows how), and wait until it is ready"
        ) from None


def _api_key() -> str:
    return os.environ.get("OPENAI_API_KEY") or "none"  # any text, for servers that need none
