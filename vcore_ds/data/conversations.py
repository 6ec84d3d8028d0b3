"""Conversations rendered by the tokenizer's chat template, with the spans that the model generates."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from vcore_ds.common.errors import UserError
from vcore_ds.data.messages import CALLS, RESULTS, TEMPLATE_FIELDS, Malformed, Message
from vcore_ds.data.templates import ChatTemplate, find_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Supervise = Literal["all", "last"]  # which turns of the assistant are learned

NOTICES = {
    "unsupervised_turns": "turns of the assistant are not supervised: with the turns that follow, the chat template "
    "renders them differently from what the model would have generated",
    "without_thinking": "have an answer without thinking after a prompt that asks for thinking: the model learns from "
    'these not to think (a row with "chat_template_kwargs": {"enable_thinking": false} is rendered without it)',
    "without_end": "turns are learned without an end: the chat template writes no special token after them, so that "
    "answers go on to the token limit",
    "control_tokens": "have a special token of the tokenizer in their text, which is read as this token",
}
"""Observations on conversations -> their text, after a number of turns or conversations."""

_EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True)
class Conversation:
    """One row of a data file."""

    messages: list[Message]
    """At least one of them by the assistant; see `vcore_ds.data.messages.check_messages`."""
    tools: Sequence[dict[str, Any]] = ()  # schemas of the functions that the assistant may call
    context_turns: Sequence[int] = ()  # positions of the assistant's turns that are not learned
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # `chat_template_kwargs`
    shape: str = ""  # of the row; empty for math and code
    unknown: Sequence[str] = ()  # columns of the row that were not read
    has_null_arguments: bool = False  # which were removed

    @property
    def has_tools(self) -> bool:
        """Whether any turn is a call or a result, also as text (Qwen's results are in turns of the user)."""
        has_results = any(m["role"] in RESULTS or m["content"].startswith("<tool_response>") for m in self.messages)
        return bool(self.tools) or has_results or any(CALLS & message.keys() for message in self.messages)

    @property
    def unknown_keys(self) -> list[str]:
        """Keys of messages that only a chat template could read."""
        return sorted({key for message in self.messages for key in message} - TEMPLATE_FIELDS)


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation rendered by the chat template."""

    text: str
    spans: list[tuple[int, int]]
    """Characters that the model generates in each learned turn; those that cannot be supervised are a notice."""
    notices: Mapping[str, int] = field(default_factory=dict)  # see `NOTICES`
    ignored: list[str] = field(default_factory=list)  # keys and variables that the template does not read


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


def render_prompt(messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase") -> str:
    """Render the prompt of the next answer, the same in training and evaluation. Raises jinja2's `TemplateError` if the
    chat template refuses the messages."""
    return ChatTemplate.load(tokenizer).render_prompt(messages)


def render_conversation(
    conversation: Conversation, tokenizer: "PreTrainedTokenizerBase", supervise: Supervise = "all"
) -> RenderedConversation:
    """Render a conversation, and its prefixes to find the characters that the model generates: thinking, answer, calls
    and the token that ends the turn. `supervise`: `last` learns the assistant's last turn alone. Raises Malformed for a
    conversation that the template refuses or does not write in full.

    A span is None where the full text does not begin with the rendered prompt and turn, because the template rewrites
    earlier turns (Qwen3 removes their thinking). The last turn is appended to its generation prompt if the template
    would render it differently. If the template writes no special token after the last turn, the token with which the
    next turn would begin is appended. In a conversation with tools, turns without thinking are supervised even if the
    template adds an empty `<think>` block to a last turn but not to an earlier one."""
    template = ChatTemplate.load(tokenizer, conversation.tools, conversation.template_variables)
    messages = conversation.messages
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    refused = f"the chat template of {tokenizer.name_or_path}"
    try:
        check = _ContentCheck(template, conversation)
        text, start, _ = template.compose(messages, check.composition)
        text.encode()
        spans = {turn: _find_span(turn, template, conversation, text, start) for turn in turns}
        problem = check.find_problem(text)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise Malformed(f"{refused} refuses this conversation (roles {roles}): {error}.") from None
    except UnicodeEncodeError as error:
        raise Malformed(f"half of a surrogate pair, which is no Unicode text ({error.reason})") from None
    if problem:
        raise Malformed(
            f"{refused} {problem}: the model would learn from another text than the row's. Take a model whose template "
            "renders it, or remove it from the row."
        )
    last = messages[-1]
    is_unlearnable = last["role"] == "assistant" and spans[len(messages) - 1] is None
    if is_unlearnable and "reasoning_content" not in last and template.can_switch_thinking_off:
        # The template's prompt opens thinking, which this turn does not have.
        variables = {**conversation.template_variables, "enable_thinking": False}
        return render_conversation(replace(conversation, template_variables=variables), tokenizer, supervise)
    wanted = [turn for turn in turns[-1 if supervise == "last" else 0 :] if turn not in conversation.context_turns]
    if is_unlearnable and len(messages) - 1 in wanted and not _begins_as_prompted(template, messages, text):
        raise Malformed(
            f"{refused} renders the messages before the last turn otherwise once this turn follows them, so what the "
            "model would generate there cannot be told. Take a model whose template keeps them, remove the text beside "
            "calls, or give the turn weight 0."
        )
    unlearned = set(check.lost_thinking)
    if template.traits.has_switch and not template.asks_for_thinking:  # it would learn to think where nobody asks
        unlearned |= {turn for turn in turns if "reasoning_content" in messages[turn]}
    supervised = {turn: span for turn in wanted if turn not in unlearned and (span := spans[turn]) is not None}
    text, learned = _add_ends(template, messages, text, supervised)
    notices = {"unsupervised_turns": len(wanted) - len(learned)} | _find_notices(template, messages, text, learned)
    unknown = conversation.unknown_keys
    ignored = unknown if not unknown or check.is_ignored(unknown) else [k for k in unknown if check.is_ignored([k])]
    ignored = [f"messages.{key}" for key in ignored]
    ignored += [f"chat_template_kwargs.{name}" for name in template.list_unread_variables()]
    notices = {name: number for name, number in notices.items() if number}
    return RenderedConversation(text, list(learned.values()), notices, ignored)


def _find_span(
    turn: int, template: ChatTemplate, conversation: Conversation, text: str, start_of_last: int | None
) -> tuple[int, int] | None:
    """Return the characters of `text` that the model generates in a turn of the assistant."""
    messages = conversation.messages
    if start_of_last is not None and turn == len(messages) - 1:
        return start_of_last, len(template.trim(text))
    if turn == 0:  # without a prompt it cannot be predicted from anything
        return None
    try:
        prompt = template.render_prompt(messages[:turn])
        prompt_and_turn = template.render(messages[: turn + 1])
    except TemplateError:  # the template accepts the conversation but not this prefix
        return None
    if not prompt_and_turn.startswith(prompt):
        return None
    prompt_and_turn = template.trim(prompt_and_turn)
    if conversation.has_tools and not text.startswith(prompt_and_turn):
        empty = _EMPTY_THINKING.match(prompt_and_turn, len(prompt))
        prompt_and_turn = prompt + prompt_and_turn[empty.end() if empty else len(prompt) :]
    return (len(prompt), len(prompt_and_turn)) if text.startswith(prompt_and_turn) else None


def _begins_as_prompted(template: ChatTemplate, messages: list[Message], text: str) -> bool:
    """Whether a text begins with the rendered messages before its last one, or the template refuses these."""
    try:
        return text.startswith(template.trim(template.render(messages[:-1])))
    except TemplateError:
        return True


def _add_ends(
    template: ChatTemplate, messages: list[Message], text: str, spans: Mapping[int, tuple[int, int]]
) -> tuple[str, dict[int, tuple[int, int]]]:
    """Let each span end with the token at which the model would stop: the next turn's first, where the template writes
    no special token after a turn."""
    special, last = template.traits.special_token, len(messages) - 1
    ended = {}
    for turn, (start, end) in spans.items():
        if not find_end(template.tokenizer, text[start:end]):
            if turn == last and (begin := template.traits.next_tokens["tool_calls" in messages[turn]]):
                text = text[:end] + begin
            token = re.compile(rf"\s*{special.pattern}").match(text, end)
            end = token.end() if token else end
        ended[turn] = start, end
    return text, ended


def _find_notices(
    template: ChatTemplate, messages: list[Message], text: str, spans: Mapping[int, tuple[int, int]]
) -> dict[str, int]:
    special, has_switch = template.traits.special_token, template.traits.has_switch
    asks = has_switch and template.asks_for_thinking
    # After a prompt that opens thinking, the empty block begins before the span.
    without_thinking = [
        turn
        for turn, (start, end) in spans.items()
        if "reasoning_content" not in messages[turn]
        and (asks or _EMPTY_THINKING.search(text, max(0, start - len("<think>\n")), end))
    ]
    texts = [message.get(key, "") for message in messages for key in ("content", "reasoning_content")]
    return {
        "without_thinking": int(bool(without_thinking)),
        "without_end": sum(not find_end(template.tokenizer, text[slice(*span)]) for span in spans.values()),
        "control_tokens": int(any(map(special.search, texts))),
    }


class _ContentCheck:
    """Looks for thinking, content and calls of a conversation in its text. The conversation is rendered again with a
    distinct word in place of each; the words occur nowhere else, and no template takes them for a marker."""

    def __init__(self, template: ChatTemplate, conversation: Conversation) -> None:
        self._template, self._conversation = template, conversation
        self._words: dict[str, tuple[str, str]] = {}  # word -> (the text that it stands for, its description)
        self._marked = [dict(message) for message in conversation.messages]
        for i, message in enumerate(self._marked, start=1):
            if message["role"] != "assistant":
                continue
            beside = "the text beside the call in " if CALLS & message.keys() else ""
            calls = "`function_calls` of "
            keys = {"reasoning_content": "the thinking of ", "content": beside, "function_calls": calls}
            for key, what in keys.items():
                if isinstance(text := message.get(key), str) and text.strip():
                    word = f"QZX{len(self._words)}ZXQ"
                    self._words[word] = text, f"{what}message {i} (assistant)"
                    message[key] = word
        self._text, _, self.composition = template.compose(self._marked)
        dropped = [word for word in self._words if word not in self._text]
        self.lost_thinking = [
            turn for turn, message in enumerate(self._marked) if message.get("reasoning_content") in dropped
        ]
        """Turns whose thinking the template leaves out, which the model would not have generated so."""

    def find_problem(self, text: str) -> str:
        """Describe text that rendering has lost, repeated or changed; empty if there is none. Earlier turns may lack
        their thinking, and are then context."""
        earlier = {message.get("reasoning_content") for message in self._marked[:-1]}
        missing = [what for word, (_, what) in self._words.items() if word not in self._text and word not in earlier]
        if self._conversation.has_tools:
            missing += self._find_missing_calls()
        else:
            squeezed, messages = _squeeze(text), enumerate(self._conversation.messages, start=1)
            others = [(i, message) for i, message in messages if message["role"] != "assistant"]
            missing += [f"message {i} ({m['role']})" for i, m in others if _squeeze(m["content"]) not in squeezed]
        lists = [i for i, m in enumerate(self._marked, start=1) if not isinstance(m.get("function_calls", ""), str)]
        if lists and self.is_ignored(["function_calls"]):
            missing.append(f"`function_calls` of message {lists[0]}")
        if missing:
            return f"leaves out {' and '.join(dict.fromkeys(missing))}"
        repeated = [what for word, (_, what) in self._words.items() if self._text.count(word) > 1]
        if repeated:
            return f"repeats {' and '.join(repeated)}"
        return self._find_changed(text)

    def _find_changed(self, text: str) -> str:
        """Compare the text with the one of words, after exchanging these for their texts, up to white space."""
        pieces = re.split(rf"({'|'.join(self._words) or '(?!)'})", self._text)
        text, at = _squeeze(text), 0
        for i, piece in enumerate(pieces):
            expected = _squeeze(self._words[piece][0] if piece in self._words else piece)
            if not text.startswith(expected, at):
                word = next((word for word in [*pieces[i:], *reversed(pieces[:i])] if word in self._words), None)
                return f"changes {self._words[word][1]}" if word else ""
            at += len(expected)
        return ""

    def _find_missing_calls(self) -> list[str]:
        """Describe the calls, functions and other messages that are not rendered."""
        words: dict[str, str] = {}

        def make_word(what: str) -> str:
            word = f"QZY{len(words)}YZQ"
            words[word] = what
            return word

        def mark_call(call: Mapping[str, Any], what: str) -> dict[str, Any]:
            name, argument = make_word(what), make_word(what)
            return {**call, "function": {**call["function"], "name": name, "arguments": {argument: argument}}}

        marked = [dict(message) for message in self._marked]
        for i, message in enumerate(marked, start=1):
            if message["role"] != "assistant" and message["content"].strip():
                message["content"] = make_word(f"message {i} ({message['role']})")
            if calls := message.get("tool_calls"):
                what = f"the call{'s' if len(calls) > 1 else ''} of message {i}"
                message["tool_calls"] = [mark_call(call, what) for call in calls]
        tools = self._conversation.tools
        tools = [{**tool, "function": {**tool["function"], "name": make_word("`tools`")}} for tool in tools]
        text = replace(self._template, tools=tools).compose(marked, self.composition).text
        return [what for word, what in words.items() if word not in text]

    def is_ignored(self, keys: Sequence[str]) -> bool:
        """Whether these keys of messages make no difference."""
        try:
            without = [{key: value for key, value in message.items() if key not in keys} for message in self._marked]
            return self._template.compose(without, self.composition).text == self._text
        except TemplateError:
            return False


def _squeeze(text: str) -> str:
    """Remove white space, which templates trim and add around texts."""
    return "".join(text.split())
