"""An OpenAI-compatible server: which one it is, whether it serves this model, and what its requests have to say."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vcore_ds.commands.evaluate.sampling import Sampling
from vcore_ds.errors import UserError, first_line
from vcore_ds.models.named_model import NamedModel

NUM_TRIES = 3
"""Attempts to reach the server before the evaluation begins; `session.MAX_RETRIES` bounds those of a request."""
SECONDS_BETWEEN_TRIES = 2.0
_FIRST_ANSWER_SECONDS = 900.0
"""Time for the first answer: some servers load the model then."""


@dataclass(frozen=True)
class Server:
    """A server that has answered."""

    url: str
    """Base of the API, as http://localhost:8000/v1."""
    name: str
    """The model's name there."""
    software: str
    """`vllm`, `sglang`, `transformers` or `unknown`."""
    version: str | None
    longest: int | None
    """Tokens of prompt and answer together; None where the server does not say."""
    sampling: Sampling
    end_ids: tuple[int, ...]
    """Tokens that end an answer, for servers that have to be told."""

    @property
    def takes_ids(self) -> bool:
        """Whether a prompt may be given as tokens; `transformers serve` takes text only."""
        return self.software != "transformers"

    def extra_body(self, max_new_tokens: int) -> dict[str, Any]:
        """The sampling fields that OpenAI's API does not have, each under the name that this server knows."""
        ours = self.sampling
        if self.software != "transformers":
            return {"top_k": ours.top_k, "min_p": ours.min_p, "repetition_penalty": ours.repetition_penalty}
        settings: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "do_sample": not ours.is_greedy,
            "repetition_penalty": ours.repetition_penalty,
            "eos_token_id": list(self.end_ids),
            "pad_token_id": self.end_ids[0],
        }
        if not ours.is_greedy:
            settings |= {"temperature": ours.temperature, "top_p": ours.top_p, "min_p": ours.min_p}
            settings["top_k"] = max(ours.top_k, 0)
        return {"generation_config": json.dumps(settings)}


def api_key() -> str:
    """What a server that asks for no key takes, too."""
    return os.environ.get("OPENAI_API_KEY") or "none"


def open_server(
    url: str, served_name: str | None, model: NamedModel, sampling: Sampling, end_ids: Sequence[int]
) -> Server:
    """The server at a URL, asked for its models and its version.

    Raises:
        UserError: it is down, returns errors, or does not serve this model.
    """
    url = url.rstrip("/")
    entries = _models(url, is_needed=served_name is None)
    name = _choose_name(url, served_name, [entry["id"] for entry in entries], model)
    entry = next((entry for entry in entries if entry["id"] == name), {})
    software, version = _software(url.removesuffix("/v1"))
    _check_adapter(url, name, entry, software, model)
    longest = entry.get("max_model_len")
    return Server(url, name, software, version, longest if isinstance(longest, int) else None, sampling, tuple(end_ids))


def check_prompt(server: Server, prompt: str, ids: Sequence[int]) -> None:
    """Asks for one token, and compares the length of the prompt: a server may add tokens of its own.

    Raises:
        UserError: the server returns an error, or has another prompt.
    """
    body = {
        "model": server.name,
        "prompt": list(ids) if server.takes_ids else prompt,
        "max_tokens": 1,
        "temperature": 0.0,
        "seed": server.sampling.seed,
        **server.extra_body(1),
    }
    answer = _request("POST", f"{server.url}/completions", body, _FIRST_ANSWER_SECONDS)
    found = answer.get("usage", {}).get("prompt_tokens") if isinstance(answer, dict) else None
    if found != len(ids):
        raise UserError(
            f"--url: {server.url}: found a prompt of {found} tokens there, {len(ids)} here; expected the same prompt "
            "as in training. Serve the very model that RUN|MODEL names, with its own tokenizer"
        )


def _models(url: str, is_needed: bool) -> list[dict[str, Any]]:
    """What the server lists; none where it does not and that is not needed: `transformers serve` fails at it without a
    cache of the hub."""
    answer = _request("GET", f"{url}/models", None, 10.0) if is_needed else _optional(f"{url}/models") or {"data": []}
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list) or not all(isinstance(e, dict) and isinstance(e.get("id"), str) for e in entries):
        raise UserError(
            f"--url: {url}: found no list of models at {url}/models; expected an OpenAI-compatible server. Give its "
            "base URL, which usually ends in /v1"
        )
    return entries


def _choose_name(url: str, served_name: str | None, names: list[str], model: NamedModel) -> str:
    if served_name is not None:
        # `transformers serve` lists what lies in the hub's cache, and serves folders too.
        return served_name
    for name in (model.path, *names[: len(names) == 1]):
        if name in names:
            return name
    listed = ", ".join(names[:20]) or "none"
    raise UserError(
        f"--url: {url}: found the models {listed}; expected one of them for {model.path}. Name it with --served-name"
    )


def _check_adapter(url: str, name: str, entry: dict[str, Any], software: str, model: NamedModel) -> None:
    """What can be told of whether an adapter is served, and on its own base."""
    if model.adapter is None:
        return
    if software == "transformers":
        raise UserError(
            f"--url: {url}: `transformers serve` cannot serve adapters; expected vLLM or SGLang for {model.adapter}. "
            "Evaluate it without --url, or export the merged model (vcore-ds export RUN --merge)"
        )
    parent = entry.get("parent")
    if software == "vllm" and not isinstance(parent, str):
        raise UserError(
            f"--url: {url}: {name} is no adapter there; expected {model.adapter}. Serve it with --enable-lora "
            f"--lora-modules {model.name}={model.adapter}, and give --served-name {model.name}"
        )
    if isinstance(parent, str) and Path(parent).name != Path(model.weights).name:
        raise UserError(
            f"--url: {url}: {name} is served on the base model {parent}; expected {model.weights}, which the "
            "adapter was trained from. Serve it on that"
        )


def _software(root: str) -> tuple[str, str | None]:
    """Which server it is, by what only that one answers."""
    for software, path in (("vllm", "/version"), ("sglang", "/get_server_info")):
        found = _optional(root + path)
        if isinstance(found, dict) and isinstance(found.get("version"), str):
            return software, found["version"]
    schema = _optional(root + "/openapi.json")
    paths = schema.get("paths") if isinstance(schema, dict) else None
    if isinstance(paths, dict) and {"/load_model", "/reset"} <= paths.keys():
        return "transformers", None
    return "unknown", None


def _optional(url: str) -> Any:
    try:
        answer = httpx.get(url, timeout=10.0)
        return answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


def _request(method: str, url: str, body: dict[str, Any] | None, timeout_seconds: float) -> Any:
    """The JSON of an answer; tried `NUM_TRIES` times where the server is down or fails."""
    headers = {"Authorization": f"Bearer {api_key()}"}
    for attempt in range(1, NUM_TRIES + 1):
        try:
            answer = httpx.request(method, url, json=body, headers=headers, timeout=timeout_seconds)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = f"cannot be reached ({first_line(error)})"
        else:
            if answer.status_code == 200:
                try:
                    return answer.json()
                except ValueError:
                    return None
            problem = f"answers {answer.status_code}: {answer.text.strip():.300}"
            if answer.status_code < 500 and answer.status_code != 429:
                break
        if attempt < NUM_TRIES:
            time.sleep(SECONDS_BETWEEN_TRIES)
    raise UserError(
        f"--url: {url}: {problem}; expected an OpenAI-compatible server that serves the model. Start it (vcore-ds eval "
        "RUN|MODEL --server-commands prints how), and wait until it is ready"
    )
