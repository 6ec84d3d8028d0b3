"""inspect's interface to an OpenAI-compatible server, checked to serve this model with these prompts."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
from inspect_ai.model import ChatMessage, ChatMessageUser, GenerateConfig, ModelOutput
from inspect_ai.model._model_call import ModelCall
from inspect_ai.model._providers.openai_compatible_completions import OpenAICompatibleCompletionsAPI
from inspect_ai.tool import ToolChoice, ToolInfo
from transformers import GenerationConfig, PreTrainedTokenizerBase

from vcore_ds.commands.evaluate.generation import Sampling, encode_prompt
from vcore_ds.commands.named_model import NamedModel, end_token_ids
from vcore_ds.common.errors import UserError, first_line

REQUEST_SECONDS = 3_600.0
"""Timeout of one answer: tens of thousands of tokens on a busy GPU take many minutes."""


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
        """Ask the server for its models and version. Raises UserError where it does not serve this model.

        Args:
            url: base of the API, such as http://localhost:8000/v1.
            served_name: name of the model there; None where it is the only one, or the path.
        """
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
        """Answer a user message.

        Raises UserError where the server counts other prompt tokens, or reports no finish reason or usage.
        """
        prompt, ids = encode_prompt(input[0].text, self._tokenizer)
        metadata = {"prompt_token_ids": ids} if self.software != "transformers" else None  # which takes text only
        config = config.model_copy(update={"extra_body": self._extra_body(config.max_tokens)})
        answer = await super().generate(
            [ChatMessageUser(content=prompt, metadata=metadata)], tools, tool_choice, config
        )
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
            return {**drawn, "repetition_penalty": sampling.repetition_penalty}
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
    """Return the user's key, or any text for servers that need none."""
    return os.environ.get("OPENAI_API_KEY") or "none"
