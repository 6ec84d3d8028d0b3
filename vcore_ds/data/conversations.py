"""Conversations: checked messages, and rendering by the tokenizer's chat template."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateRuntimeError

from vcore_ds.common.errors import UserError, first_line

Message = dict[str, Any]
"""`role` and `content` are strings; further keys (`reasoning_content`, ...) are for the chat template."""

_EXPECTED = 'Expected {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True)
class Conversation:
    """One row of a data file."""

    row: int
    """Line of a JSON-lines file or row of a parquet file, from 1."""
    messages: list[Message]
    """At least one of them by the assistant."""
    path: str = ""
    """The file, for error messages."""

    @property
    def location(self) -> str:
        """`path:row`, for error messages."""
        return f"{self.path}:{self.row}"


def split_thinking(text: str) -> tuple[str, str] | None:
    """Split a text into (thinking, answer); None unless it is exactly one `<think>` pair and the answer after it."""
    thinking, closing, answer = text.partition("</think>")
    before, opening, thinking = thinking.partition("<think>")
    if before.strip() or not (opening and closing) or "<think>" in thinking + answer or "</think>" in answer:
        return None
    return thinking.strip("\n"), answer.lstrip("\n")


def check_messages(messages: Any) -> list[Message]:
    """Return the messages without null keys. Raises ValueError where they are no conversation."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`messages` is {_kind(messages)}. {_EXPECTED}.")
    checked = [_message(message, f"message {i}") for i, message in enumerate(messages, start=1)]
    if not any(message["role"] == "assistant" for message in checked):
        roles = ", ".join(message["role"] for message in checked)
        raise ValueError(f"no turn of the assistant to learn from, found the roles {roles}.")
    return checked


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {_kind(message)}, expected an object with `role` and `content`.")
    # A parquet column gives every message all keys that any message has, with null where it has none.
    message = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f"{where} has no `{key}`, found {', '.join(message) or 'no key at all'}.")
        if not isinstance(message[key], str):
            raise ValueError(f"{where}: `{key}` is {_kind(message[key])}, expected a string.")
    return message


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    kinds |= {int: "a number", float: "a number"}
    name = "an empty list" if value == [] else kinds.get(type(value), type(value).__name__)
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except RecursionError:
        text = "nested too deeply"
    return f"{name} ({_shorten(text)})"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATE_ARGUMENTS: dict[str, Any] = {"date_string": "26 Jul 2024"}
"""Some templates (LLaMA 3.2) print today's date unless given one, so prompts would differ from day to day. This is the
default of LLaMA 3.1's template."""

_PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}"


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise UserError for a tokenizer without a chat template or without character offsets."""
    if not tokenizer.chat_template:
        raise UserError(
            f"The tokenizer of {tokenizer.name_or_path} has no chat template, so conversations cannot be rendered. "
            "Use an instruction-tuned model, or save a chat template with the tokenizer (chat_template.jinja)."
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"The tokenizer of {tokenizer.name_or_path} ({type(tokenizer).__name__}) gives no character offsets, which "
            "tell the assistant's tokens. Expected a fast tokenizer: a model folder with tokenizer.json."
        )


def render_prompt(messages: list[Message], tokenizer: "PreTrainedTokenizerBase") -> str:
    """Render the prompt of the next answer: the same text in training and in evaluation.

    Raises jinja2's `TemplateError` where the chat template refuses the messages.
    """
    return _render(messages, tokenizer, add_generation_prompt=True)


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation rendered by the chat template."""

    conversation: Conversation
    text: str
    spans: list[tuple[int, int] | None]
    """Characters that the model generates in each assistant turn; None where the turn cannot be supervised."""


def render_conversation(conversation: Conversation, tokenizer: "PreTrainedTokenizerBase") -> RenderedConversation:
    """Render a conversation, and its prefixes to find the characters that the model generates.

    A span is None where prompt and turn, rendered alone, are no prefix of the full text, because the template rewrites
    earlier turns (Qwen3 removes their thinking). The last turn is appended to its generation prompt where the template
    would render it differently; its thinking, in one `<think>` pair or as `reasoning_content`, is always kept.

    Raises `UserError` for a conversation that the template refuses.
    """
    messages = conversation.messages
    try:
        text = _render(messages, tokenizer)
    except TemplateError as error:
        raise UserError(
            f"{conversation.location}: the chat template of {tokenizer.name_or_path} refuses this conversation "
            f"(roles {', '.join(message['role'] for message in messages)}): {error}."
        ) from None
    as_generated = _last_turn_as_generated(messages, text, tokenizer)
    if as_generated is not None:
        text = "".join(as_generated)

    def span(turn: int) -> tuple[int, int] | None:
        if as_generated is not None and turn == len(messages) - 1:
            return len(as_generated[0]), len(text.rstrip())
        try:
            prompt = render_prompt(messages[:turn], tokenizer)
            prompt_and_turn = _render(messages[: turn + 1], tokenizer)
        except TemplateError:  # the template accepts the conversation but not this prefix
            return None
        if not (text.startswith(prompt_and_turn) and prompt_and_turn.startswith(prompt)):
            return None
        # Templates end a turn with the end-of-turn token and a newline, which the model never generates.
        return len(prompt), len(prompt_and_turn.rstrip())

    # A turn without a prompt cannot be predicted from anything.
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    return RenderedConversation(conversation, text, [span(turn) if turn > 0 else None for turn in turns])


def _render(
    messages: list[Message], tokenizer: "PreTrainedTokenizerBase", *, add_generation_prompt: bool = False
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **_TEMPLATE_ARGUMENTS
        )
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # Templates compute with the keys of messages, which may be of any type.
        raise TemplateRuntimeError(f"{type(error).__name__}: {first_line(error)}") from None
    assert isinstance(text, str)  # one conversation, not tokenized
    return text


def _last_turn_as_generated(
    messages: list[Message], text: str, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[str, str] | None:
    """Return (prompt, last turn) where `text` differs from what the model would see and generate; else None.

    The R1 distillations' template drops thinking from every turn, templates that do not know thinking drop
    `reasoning_content`, and Mistral's moves the system message once an answer follows. Some generation prompts already
    end in `<think>`.
    """
    *before, last = messages
    if last["role"] != "assistant" or not before:
        return None
    thinking, answer = _thinking_and_answer(last)
    try:
        prompt = render_prompt(before, tokenizer)
        if text.startswith(prompt):
            num_pairs = text.count("<think>") - _render(before, tokenizer).count("<think>") if thinking else 0
            if not thinking or (num_pairs == 1 and thinking.strip() in text):
                return None
        plain = _render([*before, {"role": "assistant", "content": _PLACEHOLDER}], tokenizer)
    except TemplateError:
        return None
    opened_by_prompt = prompt.rstrip().endswith("<think>")
    header, _, end_of_turn = plain.rpartition(_PLACEHOLDER)
    if thinking:
        opening = "" if opened_by_prompt and prompt.endswith("\n") else "\n" if opened_by_prompt else "<think>\n"
        answer = f"{opening}{thinking}\n</think>\n\n{answer}"
    elif opened_by_prompt:  # the model would have to think first, and the row has no thinking
        return None
    # Some templates put a space between a prompt and its answer.
    space = header[len(header.rstrip()) :] if prompt.endswith(header.rstrip()[-8:]) else ""
    return prompt, space + answer + end_of_turn


def _thinking_and_answer(message: Message) -> tuple[str, str]:
    """Return (thinking, answer); thinking is empty where there is none."""
    if isinstance(message.get("reasoning_content"), str):
        parts: tuple[str, str] | None = (message["reasoning_content"].strip("\n"), message["content"].lstrip("\n"))
    else:
        parts = split_thinking(message["content"])
    return parts if parts is not None and parts[0].strip() else ("", message["content"])
