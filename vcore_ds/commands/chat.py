"""`vcore-ds chat`: talk to a model in the terminal."""

import argparse
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

from vcore_ds.commands.arguments import positive, share, temperature
from vcore_ds.commands.named_model import find_named_model
from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.locks import lock_output
from vcore_ds.common.paths import expand_home
from vcore_ds.common.text import check_unicode
from vcore_ds.training.run_folder import RECIPE

HELP = "talk to a run's result, or to any model, in the terminal"
DESCRIPTION = (
    "Talk to the result of a run (before its end: to its newest checkpoint, which is exported first), or to any model "
    "or adapter. Prompts are rendered as in training. Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at the prompt, ends; "
    "/new starts a new conversation. Standard input that is no terminal is one prompt."
)
ENCODING = "Check the encoding of terminal or file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="RUN|MODEL", help="folder of a run, an adapter or a model, or a hub id")
    add("--prompt", choices=["plain", "math", "code"], default="plain", help="wrap questions as `vcore-ds prepare`")
    add("--system", metavar="TEXT", help="a system message before the conversation")
    add("--max-new-tokens", type=positive, default=2048, metavar="N", help="longest answer in tokens (default 2048)")
    add("--temperature", type=temperature, metavar="T", help="0 for greedy decoding (default: the model's setting)")
    add("--top-p", type=share, metavar="P", help="sample from the most likely tokens with this total probability")
    add("--top-k", type=positive, metavar="K", help="sample from the K most likely tokens")
    add("--seed", type=int, metavar="N", help="seed of the sampling (default: another one every time)")


def main(arguments: argparse.Namespace) -> None:
    try:
        chat(arguments)
    except KeyboardInterrupt:  # while the model is loaded, or without a terminal
        raise SystemExit(130) from None


def chat(arguments: argparse.Namespace) -> None:
    check_unicode(arguments.system or "", "--system", ENCODING)
    with export_unfinished(arguments.model) as path:
        named = find_named_model(path)
        with lasting_imports():
            from transformers import set_seed
            from transformers.utils import logging

            from vcore_ds.commands.generation import load_to_answer
            from vcore_ds.data.answers import code_prompt, math_prompt
            from vcore_ds.data.conversations import check_tokenizer
            from vcore_ds.data.messages import read_turn
            from vcore_ds.data.tokenization import load_tokenizer

        logging.disable_progress_bar()
        tokenizer = load_tokenizer(named.tokenizer, "RUN|MODEL")
        check_tokenizer(tokenizer)
        model = load_to_answer(named, "auto")
    if arguments.seed is not None:
        set_seed(arguments.seed)
    prompts: dict[str, Callable[[str], str]] = {"plain": str, "math": math_prompt, "code": code_prompt}
    make_prompt = prompts[arguments.prompt]
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(system)
    for question in read_questions():
        if question == "/new":
            messages = list(system)
            continue
        messages.append({"role": "user", "content": make_prompt(question)})
        try:
            check_unicode(question, "chat", ENCODING)
            answer = print_answer(model, tokenizer, messages, arguments)
            messages.append(read_turn(answer))
        except (UserError, KeyboardInterrupt) as problem:
            if not sys.stdin.isatty():
                raise
            messages.pop()
            stopped = "stopped; the conversation goes on without this question"
            print(f"\nvcore-ds: {problem if isinstance(problem, UserError) else stopped}", file=sys.stderr)


@contextmanager
def export_unfinished(path: str) -> Iterator[str]:
    """A context that yields the model to load: for a run without a result its newest checkpoint, exported to
    RUN/export/chat, and locked until the end, so that no other `chat` replaces it meanwhile."""
    run = expand_home(path)
    if not (run / RECIPE).is_file() or (run / "model").is_dir() or (run / "adapter").is_dir():
        yield path
        return
    from vcore_ds.commands.export.write import export_run

    with ExitStack() as held:
        with redirect_stdout(sys.stderr):
            held.enter_context(lock_output(run / "export" / "chat", waits=True))
            exported = str(export_run(run, reuse=True))
        yield exported


def read_questions() -> Iterator[str]:
    """Yield each typed question; standard input that is no terminal is one question."""
    # As Python reads words of the command line and, in some locales, standard input.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if not sys.stdin.isatty():
        question = sys.stdin.read().strip()
        if not question:
            raise UserError("chat: found nothing on standard input; expected a prompt")
        yield question
        return
    import readline  # noqa: F401  (editing and history at the prompt)

    print("Ctrl-C stops an answer, Ctrl-D ends, /new starts a new conversation.", file=sys.stderr)
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question:
            yield question


def print_answer(model: Any, tokenizer: Any, messages: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """Print the answer while it is generated, and return it. Raises UserError where the chat template refuses the
    messages, or they leave no room for an answer."""
    from jinja2 import TemplateError
    from transformers import GenerationConfig, TextStreamer

    from vcore_ds.commands.generation import end_token_ids, generate_answers, longest_sequence
    from vcore_ds.data.conversations import render_prompt

    try:
        ids = tokenizer(render_prompt(messages, tokenizer), add_special_tokens=False)["input_ids"]
    except TemplateError as error:
        raise UserError(f"chat: the chat template refuses the conversation: {error}") from None
    if len(ids) >= longest_sequence(model):
        raise UserError(
            f"chat: found {len(ids):,} tokens so far, which leave the model no room; start a new conversation"
        )
    ends = end_token_ids(model.generation_config, tokenizer)
    settings = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0])  # unset fields are the model's
    chosen = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if chosen:
        settings.update(**({"do_sample": False} if chosen.get("temperature") == 0 else {"do_sample": True, **chosen}))
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    (answer,) = generate_answers(model, [ids], [arguments.max_new_tokens], settings, streamer=streamer)
    if answer.stop_reason != "stop":
        print(f"[cut off after {len(answer.ids):,} tokens]", file=sys.stderr, flush=True)
    return tokenizer.decode(answer.ids, skip_special_tokens=True).strip()
