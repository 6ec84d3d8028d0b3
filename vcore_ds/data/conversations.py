"""Conversations rendered by the tokenizer's chat template, with the spans that the model generates."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError, TemplateRuntimeError

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.data.messages import TEMPLATE_FIELDS, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Supervise = Literal["all", "last"]  # which turns of the assistant are learned

_DATE = datetime(2024, 7, 26)
"""The default date of LLaMA 3.1's template, also given to templates that print today's (LLaMA 3.2, gpt-oss), whose
prompts would differ from day to day."""

_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
"""A template's call for today's date, which transformers lets no argument replace."""


@lru_cache
def _fix_date(template: str) -> str:
    return _TODAY.sub(lambda today: repr(_DATE.strftime(today[2])), template)


@lru_cache
def _reads_thinking(template: str) -> bool:
    is_key = re.search(r"\.thinking\b|['\"]thinking['\"]", template)
    return is_key is not None and "reasoning_content" not in template


_PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}"

_EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True)
class Conversation:
    """One row of a data file."""

    row: int  # line of a JSON-lines file or row of a parquet file, from 1
    messages: list[Message]
    """At least one of them by the assistant; see `vcore_ds.data.messages.check_messages`."""
    path: str = ""
    tools: Sequence[dict[str, Any]] = ()  # schemas of the functions that the assistant may call
    context_turns: Sequence[int] = ()  # positions of the assistant's turns that are not learned
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # the row's, for the chat template

    @property
    def location(self) -> str:
        """`path:row`, for error messages."""
        return f"{self.path}:{self.row}"

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) or any("tool_calls" in message for message in self.messages)


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation rendered by the chat template."""

    conversation: Conversation
    text: str
    spans: list[tuple[int, int] | None]
    """Characters that the model generates in each learned turn; None if it cannot be supervised."""
    num_without_thinking: int = 0  # supervised turns whose thinking the template leaves out
    ignored: list[str] = field(default_factory=list)  # keys of messages that the template does not read


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
    """Render the prompt of the next answer, the same in training and evaluation. Raises jinja2's `TemplateError` if the
    chat template refuses the messages."""
    return _Template(tokenizer).render_prompt(messages)


@dataclass(frozen=True)
class _Template:
    """A tokenizer's chat template with the functions of a conversation."""

    tokenizer: "PreTrainedTokenizerBase"
    tools: Sequence[dict[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    def render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        """Render the messages. Raises jinja2's `TemplateError` if the template refuses them."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=list(self.tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=self.source,
                date_string=_DATE.strftime("%d %b %Y"),
                **self.variables,
            )
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Templates compute with the keys of messages, which may be of any type.
            raise TemplateRuntimeError(f"{type(error).__name__}: {first_line(error)}") from None
        assert isinstance(text, str)  # one conversation, not tokenized
        return text

    def render_prompt(self, messages: list[Message]) -> str:
        return self.render(messages, add_generation_prompt=True)

    @cached_property
    def source(self) -> str:
        return _fix_date(self.tokenizer.get_chat_template(tools=list(self.tools) or None))

    @property
    def thinking_key(self) -> str | None:
        """`thinking` for a template that reads thinking from this key (gpt-oss, LFM2), not from `reasoning_content`."""
        return "thinking" if _reads_thinking(self.source) else None

    @property
    def has_channels(self) -> bool:
        """Whether the template marks thinking otherwise than by `<think>`: gpt-oss's channels."""
        return _reads_thinking(self.source) and "<think>" not in self.source

    def adapt(self, message: Message) -> Message:
        """Move thinking to the key that the template reads."""
        thinking, answer = _split_message(message)
        if not thinking or (self.thinking_key is None and "reasoning_content" in self.source):
            return message
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
        if self.thinking_key is None:
            return message | {"content": f"<think>\n{thinking}\n</think>\n\n{answer}"}
        return message | {"content": answer, self.thinking_key: thinking}

    def compose(self, messages: list[Message]) -> tuple[str, int | None]:
        """Render the text; also return the start of the last turn if it was appended to its generation prompt."""
        adapted = [self.adapt(message) for message in messages]
        text = self.render(adapted)
        as_generated = self._last_turn_as_generated(adapted, messages[-1], text)
        return (text, None) if as_generated is None else ("".join(as_generated), len(as_generated[0]))

    def _last_turn_as_generated(self, messages: list[Message], unadapted: Message, text: str) -> tuple[str, str] | None:
        """Return (prompt, last turn) where `text` differs from what the model would see and generate; else None: the R1
        distillations' template drops thinking from every turn, templates that do not know thinking drop
        `reasoning_content`, Mistral's moves the system message once an answer follows, gpt-oss's drops the thinking
        before calls, and some generation prompts already end in `<think>`."""
        *before, last = messages
        if last["role"] != "assistant" or not before:
            return None
        thinking, answer = _split_message(unadapted)
        has_calls = "tool_calls" in last
        try:
            prompt = self.render_prompt(before)
            if text.startswith(prompt):
                num_pairs = text.count("<think>") - self.render(before).count("<think>") if thinking else 0
                expected = 0 if self.has_channels else 1
                if not thinking or (num_pairs == expected and thinking.strip() in text):
                    return None
            if self.has_channels or has_calls:
                question = [{"role": "user", "content": _PLACEHOLDER}]
                start, turn = self.render_prompt(question), self.render([*question, last])
                if not turn.startswith(start):
                    return None
                turn = turn.removeprefix(start)
            else:
                plain = self.render([*before, {"role": "assistant", "content": _PLACEHOLDER}])
        except TemplateError:
            return None
        if self.has_channels:
            return prompt, turn
        opened_by_prompt = prompt.rstrip().endswith("<think>")
        if opened_by_prompt and not thinking:  # the model would have to think first, and the row has no thinking
            return None
        opening = "" if opened_by_prompt and prompt.endswith("\n") else "\n" if opened_by_prompt else "<think>\n"
        block = f"{opening}{thinking}\n</think>\n\n" if thinking else ""
        if has_calls:
            return None if "<think>" in turn else (prompt, block + turn)
        header, _, end_of_turn = plain.rpartition(_PLACEHOLDER)
        # Some templates put a space between a prompt and its answer.
        space = header[len(header.rstrip()) :] if prompt.endswith(header.rstrip()[-8:]) else ""
        return prompt, space + block + answer + end_of_turn


def render_conversation(
    conversation: Conversation, tokenizer: "PreTrainedTokenizerBase", supervise: Supervise = "all"
) -> RenderedConversation:
    """Render a conversation, and its prefixes to find the characters that the model generates.

    A span is None where prompt and turn, rendered alone, are no prefix of the full text, because the template rewrites
    earlier turns (Qwen3 removes their thinking). The last turn is appended to its generation prompt if the template
    would render it differently; its thinking, in one `<think>` pair or as `reasoning_content`, is always kept.

    In a conversation with tools, turns without thinking are supervised even if the template adds an empty `<think>`
    block to a last turn but not to an earlier one.

    Args:
        supervise: `last` learns the assistant's last turn alone.

    Raises `UserError` for a conversation that the template refuses, or of which it leaves something out.
    """
    template, messages = (
        _Template(tokenizer, conversation.tools, conversation.template_variables),
        conversation.messages,
    )
    adapted = [template.adapt(message) for message in messages]
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    refused = f"{conversation.location}: the chat template of {tokenizer.name_or_path}"
    try:
        text, start_of_last = template.compose(messages)
        spans = {turn: _find_span(turn, template, adapted, text, start_of_last) for turn in turns}
        if conversation.has_tools:
            spans = {
                turn: span or _find_span(turn, template, adapted, text, start_of_last, without_empty_thinking=True)
                for turn, span in spans.items()
            }
        left_out = _find_left_out(template, conversation, text, spans)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"{refused} refuses this conversation (roles {roles}): {error}.") from None
    if left_out:
        raise UserError(
            f"{refused} leaves out {left_out}: the model would learn from another text than the row's. Take a model "
            "whose template has it, or remove it from the row."
        )
    learned = [
        turn for turn in (turns[-1:] if supervise == "last" else turns) if turn not in conversation.context_turns
    ]
    num_without_thinking = sum(
        thinking.strip() not in text[slice(*span)]
        for turn in learned
        if (span := spans[turn]) and (thinking := _split_message(messages[turn])[0])
    )
    ignored = _find_ignored(template, messages, text)
    return RenderedConversation(conversation, text, [spans[turn] for turn in learned], num_without_thinking, ignored)


def _find_span(
    turn: int,
    template: _Template,
    messages: list[Message],
    text: str,
    start_of_last: int | None,
    *,
    without_empty_thinking: bool = False,
) -> tuple[int, int] | None:
    """Return the characters of `text` that the model generates in a turn of the assistant."""
    if start_of_last is not None and turn == len(messages) - 1:
        return start_of_last, len(text.rstrip())
    if turn == 0:  # without a prompt it cannot be predicted from anything
        return None
    try:
        prompt = template.render_prompt(messages[:turn])
        prompt_and_turn = template.render(messages[: turn + 1])
    except TemplateError:  # the template accepts the conversation but not this prefix
        return None
    if not prompt_and_turn.startswith(prompt):
        return None
    if without_empty_thinking and (block := _EMPTY_THINKING.match(prompt_and_turn, len(prompt))):
        prompt_and_turn = prompt + prompt_and_turn[block.end() :]
    # Templates end a turn with the end-of-turn token and a newline, which the model never generates.
    return (len(prompt), len(prompt_and_turn.rstrip())) if text.startswith(prompt_and_turn) else None


def _find_left_out(
    template: _Template, conversation: Conversation, text: str, spans: dict[int, tuple[int, int] | None]
) -> str:
    """Name the contents of a conversation that its text lacks; empty for none. Thinking is not checked, nor
    the assistant's text in turns that cannot be supervised: templates shorten earlier turns on purpose, and these are
    counted."""
    messages = conversation.messages
    contents = {
        i: answer
        for i, message in enumerate(messages)
        if (answer := _split_message(message)[1]).strip() and spans.get(i, (0, 0)) is not None
    }
    if not conversation.has_tools and all(answer.strip() in text for answer in contents.values()):
        return ""
    # Contents may occur elsewhere, and templates rewrite calls, so each is replaced by a distinct word.
    words: dict[str, str] = {}

    def make_word(what: str) -> str:
        word = f"QZX{len(words)}ZXQ"
        words[word] = what
        return word

    marked = [dict(message) for message in messages]
    for i, message in enumerate(marked):
        calls = message.get("tool_calls", [])
        if i in contents:
            what = f"message {i + 1} ({message['role']})"
            before = message["content"].removesuffix(contents[i])
            message["content"] = before + make_word(f"the text beside the call in {what}" if calls else what)
        what = f"the call{'s' if len(calls) > 1 else ''} of message {i + 1}"
        for j, call in enumerate(calls):
            name, argument = make_word(what), make_word(what)
            exchanged = {**call, "function": {**call["function"], "name": name, "arguments": {argument: argument}}}
            message["tool_calls"] = [*message["tool_calls"][:j], exchanged, *message["tool_calls"][j + 1 :]]
    tools = [{**tool, "function": {**tool["function"], "name": make_word("`tools`")}} for tool in conversation.tools]
    marked_text, _ = replace(template, tools=tools).compose(marked)
    return " and ".join(dict.fromkeys(what for word, what in words.items() if word not in marked_text))


def _find_ignored(template: _Template, messages: list[Message], text: str) -> list[str]:
    """Return the keys of messages that make no difference to the text."""
    unknown = sorted({key for message in messages for key in message} - TEMPLATE_FIELDS)

    def is_ignored(keys: Sequence[str]) -> bool:
        try:
            without = [{key: value for key, value in message.items() if key not in keys} for message in messages]
            return template.compose(without)[0] == text
        except TemplateError:
            return False

    return unknown if unknown and is_ignored(unknown) else [key for key in unknown if is_ignored([key])]


def _split_message(message: Message) -> tuple[str, str]:
    """Split a message into (thinking, answer); thinking is empty if there is none."""
    thinking = message.get("reasoning_content", "").strip("\n")
    return thinking, message["content"].lstrip("\n") if thinking else message["content"]
