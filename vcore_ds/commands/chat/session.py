"""A conversation in the terminal: prompts in, answers token by token, from one model or from two."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, TextStreamer

from vcore_ds.commands.chat.models import Voice
from vcore_ds.data.conversations import Message
from vcore_ds.data.rendering import render_prompt
from vcore_ds.errors import UserError
from vcore_ds.grading.prompts import code_prompt, math_prompt
from vcore_ds.models.generation import generate_answers, longest_sequence
from vcore_ds.models.named_model import AnsweringModel, end_token_ids

PROMPTS: dict[str, Callable[[str], str]] = {"plain": str, "math": math_prompt, "code": code_prompt}


class Sampling(NamedTuple):
    """How answers are drawn; None for the model's own setting (generation_config.json)."""

    max_new_tokens: int
    temperature: float | None = None
    """0 takes the likeliest token."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


End = Literal["finished", "cut off", "stopped"]


class Answer(NamedTuple):
    """What a model answered, and how it went."""

    text: str
    num_tokens: int
    end: End
    """By the model itself, at the longest length, or by Ctrl-C."""
    seconds: float


class _Stream(TextStreamer):
    """Writes the answer as it comes, and keeps it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.num_tokens, self.pieces = 0, list[str]()

    def put(self, value: torch.Tensor) -> None:
        self.num_tokens += 0 if self.next_tokens_are_prompt else value.numel()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        print(text, end="\n" if stream_end else "", flush=True)


def run_session(voices: Sequence[Voice], sampling: Sampling, *, prompt: str, system: str | None) -> None:
    """Asks and answers until the user ends it; one prompt where standard input is no terminal.

    Raises:
        UserError: nothing was asked, or the model's template refuses it.
        KeyboardInterrupt: Ctrl-C during the answer to standard input.
    """
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    begin: list[Message] = [{"role": "system", "content": system}] if system else []
    histories = [list(begin) for _ in voices]
    if not sys.stdin.isatty():
        question = sys.stdin.read().strip()
        if not question:
            raise UserError("chat: found nothing on standard input; expected a prompt")
        _answer_all(voices, histories, PROMPTS[prompt](question), sampling, is_interactive=False)
        return
    import readline  # noqa: F401  (editing and history at the prompt)

    print("Ctrl-C stops an answer, Ctrl-D ends, /new begins a new conversation.", file=sys.stderr)
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question == "/new":
            histories = [list(begin) for _ in voices]
        elif question:
            try:
                _answer_all(voices, histories, PROMPTS[prompt](question), sampling, is_interactive=True)
            except KeyboardInterrupt:  # before the first token, or after the last
                print()
                for history in histories:
                    if history and history[-1]["role"] == "user":
                        history.pop()


def _answer_all(
    voices: Sequence[Voice], histories: Sequence[list[Message]], question: str, sampling: Sampling, *,
    is_interactive: bool,
) -> None:  # fmt: skip
    """The answers of all voices, one after the other, each with the conversation that it had itself."""
    for voice, history in zip(voices, histories, strict=True):
        if len(voices) > 1:
            print(f"--- {voice.name}", flush=True)
        history.append({"role": "user", "content": question})
        try:
            answer = answer_question(voice, history, sampling)
        except UserError as error:
            if not is_interactive:
                raise
            history.pop()
            print(f"vcore-ds: {error}", file=sys.stderr)
            continue
        rate = answer.num_tokens / max(answer.seconds, 1e-9)
        print(f"[{answer.num_tokens:,} tokens, {answer.end}, {rate:.1f} tokens/s]", file=sys.stderr, flush=True)
        history.append({"role": "assistant", "content": answer.text})
        if answer.end == "stopped" and not is_interactive:
            raise KeyboardInterrupt


def answer_question(voice: Voice, messages: list[Message], sampling: Sampling) -> Answer:
    """Prints the answer to the last message while it is generated.

    Raises:
        UserError: the template refuses the messages, or they leave no room for an answer.
    """
    model, tokenizer = voice.model, voice.tokenizer
    try:
        text = render_prompt(messages, tokenizer)
    except TemplateError as error:
        raise UserError(
            f"chat: the chat template of {tokenizer.name_or_path} refuses the conversation: {error}"
        ) from None
    prompt, longest = tokenizer(text, add_special_tokens=False)["input_ids"], longest_sequence(model)
    if len(prompt) >= longest:
        raise UserError(
            f"chat: found {len(prompt):,} tokens so far; expected fewer than the {longest:,} that the model takes"
        )
    stream, start = _Stream(tokenizer), time.perf_counter()
    settings = generation_settings(model, tokenizer, sampling)
    try:
        with voice.during():
            (answer,) = generate_answers(model, [prompt], [sampling.max_new_tokens], settings, streamer=stream)
        end: End = "finished" if answer.stop_reason == "stop" else "cut off"
    except KeyboardInterrupt:
        stream.end()
        end = "stopped"
    return Answer("".join(stream.pieces).strip(), stream.num_tokens, end, time.perf_counter() - start)


def generation_settings(model: AnsweringModel, tokenizer: Any, sampling: Sampling) -> GenerationConfig:
    """The model's own settings with those of the user in their place."""
    own = model.generation_config
    ends = end_token_ids(own, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    samples = bool(own.do_sample) or sampling.top_p is not None or sampling.top_k is not None
    temperature = sampling.temperature
    if temperature is None:
        temperature = (own.temperature or 1.0) if samples else 0.0
    settings: dict[str, Any] = {"eos_token_id": ends, "pad_token_id": pad}
    if own.repetition_penalty is not None:
        settings["repetition_penalty"] = own.repetition_penalty
    if temperature == 0:
        return GenerationConfig(do_sample=False, **settings)
    settings |= {"do_sample": True, "temperature": temperature}
    for name in ("top_p", "top_k"):
        value = getattr(sampling, name)
        settings[name] = value if value is not None else getattr(own, name)
    return GenerationConfig(**{name: value for name, value in settings.items() if value is not None})
