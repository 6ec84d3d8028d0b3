"""The tokens that end a turn in training, at which generation stops too."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from vcore_ds.data.conversations import Conversation, render_conversation
from vcore_ds.data.messages import Malformed, Message
from vcore_ds.data.templates import find_end
from vcore_ds.models.description import find_file
from vcore_ds.planning.known_models import CONFIG_NAME, read_config_file

_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
_TURNS: tuple[Message, ...] = ({"content": "a", "reasoning_content": "t"}, {"content": "", "tool_calls": [_CALL]})


@lru_cache(maxsize=8)
def find_end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the special tokens with which learned answers and calls end, by the tokenizer's chat template."""
    ends = []
    for turn in _TURNS if tokenizer.chat_template else ():
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", **turn}]
        try:
            rendered = render_conversation(Conversation(messages, [_TOOL] * ("tool_calls" in turn)), tokenizer)
        except Malformed:  # the template knows no calls
            continue
        ends += [find_end(tokenizer, rendered.text[slice(*span)]) for span in rendered.spans]
    ids = [tokenizer.convert_tokens_to_ids(token) for token in dict.fromkeys(ends) if token]
    return tuple(id for id in ids if isinstance(id, int))


def read_end_tokens(path: str) -> list[int]:
    """Return the end tokens of a model's generation_config.json, or else config.json; `path`: folder or hub id."""
    for name in (GENERATION_CONFIG_NAME, CONFIG_NAME):
        if (file := find_file(path, name)) is not None:
            ends = _read_object(file).get("eos_token_id")
            return [token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)]
    return []


def add_end_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the ends of learned turns to generation_config.json in a model's folder, where it does not list them."""
    own = read_end_tokens(str(folder))
    if missing := [token for token in find_end_tokens(tokenizer) if token not in own]:
        path = folder / GENERATION_CONFIG_NAME
        settings = (_read_object(path) if path.is_file() else {}) | {"eos_token_id": own + missing}
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _read_object(path: Path) -> dict[str, Any]:
    """Read an object; empty for a damaged file, which loading the model reports."""
    try:
        return read_config_file(path)
    except ValueError:
        return {}


def describe_end_tokens(path: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Say, in a line of the start screen, where learned turns end otherwise than the answers of the model at `path`."""
    if not tokenizer.chat_template:
        return []
    ends, own = find_end_tokens(tokenizer), read_end_tokens(path)
    if not ends:
        return ["End of turn:  none is learned: the chat template writes no special token there"]
    if missing := [token for token in ends if token not in own]:
        names = " and ".join(map(str, tokenizer.convert_ids_to_tokens(missing)))
        return [f"End of turn:  {names}, added to the model's end tokens in chat, eval and generation_config.json"]
    return []
