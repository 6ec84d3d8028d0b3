"""Chat templates: prompts, the form in which a template reads thinking, and the ends of turns."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from jinja2 import TemplateError, TemplateRuntimeError

from vcore_ds.common.errors import first_line
from vcore_ds.data.messages import THINKING, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DATE = datetime(2024, 7, 26)
"""The default date of LLaMA 3.1's template, also given to templates that print today's (LLaMA 3.2, gpt-oss), whose
prompts would differ from day to day."""

_TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
"""A template's call for today's date, which transformers lets no argument replace."""

_SWITCHES = ("enable_thinking", "thinking")
"""Variables that switch thinking on in templates where it is off by default (Qwen3.5's small models and Gemma 4;
DeepSeek-V3.1). A row's `chat_template_kwargs` may switch it off."""

_WORDS = "QZXquestionZXQ", "QZXthinkingZXQ", "QZXanswerZXQ"
"""Texts that no template interprets."""
_QUESTION, _ANSWER = {"role": "user", "content": _WORDS[0]}, {"role": "assistant", "content": _WORDS[2]}
_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}

Composition = Literal["rendered", "turn", "block"]
"""How the last turn is written. `rendered`: as the template renders the conversation. `turn`: after its generation
prompt, as the template renders it after a single question. `block`: the same, with the thinking in tags before it."""


class ComposedText(NamedTuple):
    """A conversation whose last turn follows the prompt that the model would see."""

    text: str
    start: int | None  # of the last turn, if it was appended to its prompt
    composition: Composition


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the functions and variables of a conversation, whose messages are in the form of
    `vcore_ds.data.messages.Message`."""

    tokenizer: "PreTrainedTokenizerBase"
    source: str
    tools: Sequence[dict[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        tokenizer: "PreTrainedTokenizerBase",
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> Self:
        """Take the tokenizer's template, with a fixed date."""
        source = tokenizer.get_chat_template(tools=list(tools) or None)
        source = _TODAY.sub(lambda today: repr(_DATE.strftime(today[2])), source)
        return cls(tokenizer, source, tools, variables or {})

    @property
    def asks_for_thinking(self) -> bool:
        """Whether the row has not switched thinking off."""
        return all(self.variables.get(name, True) for name in _SWITCHES)

    @property
    def can_switch_thinking_off(self) -> bool:
        """Whether the row leaves open whether the prompt asks for thinking, and the template has both prompts."""
        return self.traits.has_switch and not any(name in self.variables for name in _SWITCHES)

    def list_unread_variables(self) -> list[str]:
        """List the row's variables that the template does not mention."""
        patterns = {name: "|".join(_SWITCHES) if name in _SWITCHES else re.escape(name) for name in self.variables}
        return sorted(name for name, words in patterns.items() if not re.search(rf"\b({words})\b", self.source))

    @property
    def traits(self) -> "TemplateTraits":
        return _find_traits(self.tokenizer, self.source)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Render the messages. Raises jinja2's `TemplateError` if the template refuses them."""
        return self.render_raw([self._adapt(message) for message in messages], add_generation_prompt)

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Render the prompt of the next answer."""
        return self.render(messages, add_generation_prompt=True)

    def trim(self, text: str) -> str:
        """Remove what the model never generates behind a turn: the newline, and what ends the text."""
        return text.rstrip().removesuffix(self.traits.end_of_text).rstrip()

    def render_raw(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """Render messages whose thinking is where the template reads it."""
        switches = dict.fromkeys(_SWITCHES, self.asks_for_thinking)
        arguments = inspect.signature(self.tokenizer.apply_chat_template).parameters if self.variables else {}
        if reserved := sorted(arguments.keys() & self.variables.keys()):
            raise TemplateRuntimeError(
                f"`chat_template_kwargs` has `{reserved[0]}`, which is no variable of a template"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=list(self.tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=self.source,
                date_string=_DATE.strftime("%d %b %Y"),
                **{**switches, **self.variables},
            )
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Templates compute with the keys of messages, which may be of any type.
            raise TemplateRuntimeError(f"{type(error).__name__}: {first_line(error)}") from None
        assert isinstance(text, str)  # one conversation, not tokenized
        return text

    def _adapt(self, message: Message) -> Message:
        """Move thinking to where the template reads it."""
        key = self.traits.thinking_key
        if not (thinking := message.get("reasoning_content")) or key == "reasoning_content":
            return message
        message = remove_thinking(message)
        if key is not None:
            return message | {key: thinking}
        opening, closing = self.traits.thinking_tags
        return message | {"content": f"{opening}{thinking}{closing}{message['content']}"}

    def compose(self, messages: Sequence[Message], composition: Composition | None = None) -> ComposedText:
        """Render a conversation. Where possible its last turn follows its generation prompt, which templates do not
        always do: the R1 distillations' drops thinking from every turn, Mistral's moves the system message once an
        answer follows, gpt-oss's drops the thinking before calls, and some generation prompts already end in `<think>`.
        `composition`: that of a conversation of the same form; None to find it."""
        text, (*before, last) = self.render(messages), messages
        if composition == "rendered" or last["role"] != "assistant" or not before:
            return ComposedText(text, None, "rendered")
        thinking = last.get("reasoning_content", "").strip()
        try:
            prompt = self.render_prompt(before)
            if composition is None and text.startswith(prompt) and thinking in text[len(prompt) :]:
                return ComposedText(text, None, "rendered")
            can_append = text.startswith(prompt) or self._is_prompted_like_a_question(before, prompt)
            appended = self._write_turn(prompt, last, composition) if can_append else None
        except TemplateError:
            appended = None
        if appended is None:
            return ComposedText(text, None, "rendered")
        return ComposedText(prompt + appended[0], len(prompt), appended[1])

    def _is_prompted_like_a_question(self, before: Sequence[Message], prompt: str) -> bool:
        """Whether the prompt of an answer to `before` ends as that to a lone question. Behind a result of a tool it may
        not (Gemma 4's opens thinking there alone), and what follows a lone question does not belong there."""
        ending = self.render_prompt([_QUESTION]).removeprefix(self.trim(self.render([_QUESTION])))
        return prompt.removeprefix(self.trim(self.render(before))) == ending

    def _write_turn(
        self, prompt: str, last: Message, composition: Composition | None
    ) -> tuple[str, Composition] | None:
        """Return the text of a turn after its prompt; None if the template does not allow that, or if the model would
        have to generate text that is not in the row."""
        thinking = last.get("reasoning_content", "").strip("\n")
        asked, turn = self.render_prompt([_QUESTION]), self.render([_QUESTION, last])
        if composition != "block" and turn.startswith(asked) and (composition or thinking.strip() in turn):
            return turn.removeprefix(asked), "turn"
        if not thinking or (composition is None and thinking.strip() in turn):
            return None
        opening, closing = self.traits.thinking_tags
        if asked.rstrip().endswith("<think>"):
            asked = asked[: asked.rindex("<think>")]
        if prompt.rstrip().endswith("<think>"):
            opening = "" if prompt.endswith("\n") else "\n"
        turn = self.render([_QUESTION, remove_thinking(last)])
        if not turn.startswith(asked):
            return None
        return f"{opening}{thinking}{closing}{turn.removeprefix(asked)}", "block"


class TemplateTraits(NamedTuple):
    """Properties of a template that are found by rendering."""

    special_token: re.Pattern[str]
    """Matches any special token of the tokenizer."""
    thinking_key: str | None
    """The key of a message in which the template reads thinking; None for `<think>` in the content."""
    thinking_tags: tuple[str, str]
    """The texts around thinking that the template does not write by itself."""
    has_switch: bool
    """Whether prompts with thinking differ from those without."""
    next_tokens: tuple[str, str]
    """The special token, with white space before it, that begins the message after an answer, and after a call; empty
    if there is none. It ends the turns of GLM-4.5."""
    end_of_text: str
    """What follows the end of a conversation's last turn (Phi-3: `<|endoftext|>` after `<|end|>`)."""


def find_end(tokenizer: "PreTrainedTokenizerBase", text: str) -> str:
    """Return the special token at the end of a text; empty if there is none."""
    end = re.search(rf"{match_special_tokens(tokenizer).pattern}\Z", text)
    return end[0] if end else ""


def remove_thinking(message: Message) -> Message:
    """Return the message without thinking."""
    return {key: value for key, value in message.items() if key != "reasoning_content"}


@lru_cache(maxsize=8)
def _find_traits(tokenizer: "PreTrainedTokenizerBase", source: str) -> TemplateTraits:
    template = ChatTemplate(tokenizer, source)
    special_token = match_special_tokens(tokenizer)
    switched_off = ChatTemplate(tokenizer, source, variables=dict.fromkeys(_SWITCHES, False))
    has_switch = _try_render(template, [_QUESTION], True) != _try_render(switched_off, [_QUESTION], True)
    return TemplateTraits(
        special_token,
        *_find_thinking_form(template),
        has_switch,
        (
            _find_next_token(template, special_token, _ANSWER, _QUESTION),
            _find_next_token(template, special_token, _CALLING, {"role": "tool", "content": _WORDS[0]}),
        ),
        _find_end_of_text(template, special_token),
    )


@lru_cache(maxsize=8)
def match_special_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str]:
    """Make a pattern, with one group, of the tokenizer's special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    tokens = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    # By first characters, at which a search stops: alternatives of 1,000 tokens would be tried at every character.
    rests: dict[str, list[str]] = {}
    for token in sorted(filter(None, tokens), key=len, reverse=True):
        rests.setdefault(re.escape(token[0]), []).append(re.escape(token[1:]))
    alternatives = [f"{first}(?:{'|'.join(others)})" for first, others in rests.items()]
    return re.compile(f"({'|'.join(alternatives) or '(?!)'})")


def _find_thinking_form(template: ChatTemplate) -> tuple[str | None, tuple[str, str]]:
    """Find the key and the tags of thinking. Each key is tried in an answer and in a call, since Gemma 4's first
    templates read thinking in calls only."""
    tags = "<think>\n", "\n</think>\n\n"
    for turn in (_ANSWER, _CALLING):
        for key in THINKING:
            text = _try_render(template, [_QUESTION, {**turn, key: _WORDS[1]}])
            if text.count(_WORDS[1]) != 1:
                continue
            prompt, plain = _try_render(template, [_QUESTION], True), _try_render(template, [_QUESTION, turn])
            if turn is _CALLING and text.startswith(prompt) and plain.startswith(prompt):
                opening, _, closing = text[len(prompt) : len(prompt) + len(text) - len(plain)].partition(_WORDS[1])
                tags = opening, closing
            return key, tags
    unopened = "", tags[1]  # the template writes the first tag
    thought = {**_ANSWER, "content": _WORDS[1].join(unopened) + _WORDS[2]}
    text = _try_render(template, [_QUESTION, thought]).rpartition(_WORDS[0])[2]
    return None, unopened if text.count("<think>") == 1 else tags


def _find_next_token(template: ChatTemplate, special_token: re.Pattern[str], turn: Message, following: Message) -> str:
    text = _try_render(template, [_QUESTION, turn]).rstrip()
    after = _try_render(template, [_QUESTION, turn, following])
    token = re.compile(rf"\s*{special_token.pattern}").match(after, len(text))
    return token[0] if token and after.startswith(text) else ""


def _find_end_of_text(template: ChatTemplate, special_token: re.Pattern[str]) -> str:
    alone = _try_render(template, [_QUESTION, _ANSWER]).rpartition(_WORDS[2])[2]
    followed = _try_render(template, [_QUESTION, _ANSWER, _QUESTION]).rpartition(_WORDS[2])[2]
    pieces, others = special_token.split(alone), special_token.split(followed)
    shared = next((i for i, (one, two) in enumerate(zip(pieces, others, strict=False)) if one != two), len(others))
    return "".join(pieces[shared:]).strip() if any(map(special_token.fullmatch, pieces[:shared])) else ""


def _try_render(template: ChatTemplate, messages: list[Message], add_generation_prompt: bool = False) -> str:
    """Render; empty if the template refuses the messages."""
    try:
        return template.render_raw(messages, add_generation_prompt)
    except TemplateError:
        return ""
