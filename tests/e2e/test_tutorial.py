"""The commands of docs/tutorial.md, in order, in an empty folder: each prints the lines that the page shows.

The model is the page's with 2 of its 30 layers, which saves minutes of CPU time, so numbers that depend on its weights
are not compared. `python -m tests.e2e.test_tutorial FOLDER` types every line as it stands, with the whole model,
compares all numbers, and prints the CPU seconds of each block.
"""

import json
import math
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from launch_scripts.quickstart import DATA
from launch_scripts.quickstart_data import MODEL_NAME, prepare_quickstart_data
from tests.helpers.commands import REPOSITORY, command_environment, is_listened_on, wait_until
from tests.helpers.jobs import ForkedJob
from vcore_ds.commands.cli import main

pytestmark = pytest.mark.e2e

PAGE = REPOSITORY / "docs" / "tutorial.md"
NUM_LAYERS = 2
DEEPSPEED_PORT = 29500
"""Default of the deepspeed launcher."""
LAUNCHER = "deepspeed --quiet --num_accelerators 2 --module vcore_ds "

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
WITHOUT_WEIGHTS = re.compile(
    r"\{|rows read |  malformed |kept |formats: |  this store |8 of 24 traces|"
    r"Batch: |Data: .* sequences|Held out: "
)
"""Beginnings of lines whose numbers do not depend on the weights."""
TOLERANCE = 0.1
"""Relative difference of other numbers between machines, with the page's model."""


def read_blocks() -> list[tuple[str, list[str]]]:
    """(commands, shown lines) of each block of commands."""
    blocks = re.findall(r"^```(bash|text)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["bash", "text"] * (len(blocks) // 2)
    return [(blocks[i][1], blocks[i + 1][1].splitlines()) for i in range(0, len(blocks), 2)]


def split_commands(block: str) -> list[str]:
    """The commands of a block; one that reads a here-document keeps its lines."""
    commands = re.findall(r"^(?:[^\n]*<<'EOT'\n.*?\nEOT|[^\n]+)$", block, re.DOTALL | re.MULTILINE)
    assert "\n".join(commands) == block.rstrip("\n")
    return commands


def check_output(shown: list[str], output: str, *, has_page_weights: bool) -> None:
    """Assert that every shown line was printed; `...` stands for any text."""
    for line in shown:
        texts, numbers = NUMBER.split(line), NUMBER.findall(line)
        # Columns are as wide as their numbers.
        parts = [re.sub(r"(?:\\ )+", " +", re.escape(text)).replace(re.escape("..."), ".*") for text in texts]
        expected = re.compile(r"(-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?)".join(parts))
        matches = [match.groups() for printed in output.splitlines() if (match := expected.fullmatch(printed))]
        if WITHOUT_WEIGHTS.match(line):
            matches = [match for match in matches if list(match) == numbers]
        elif has_page_weights:
            compared = [i for i in range(len(numbers)) if not re.match(r" s\b", texts[i + 1])]  # all but times
            matches = [match for match in matches if all(_is_close(match[i], numbers[i]) for i in compared)]
        assert matches or line == "...", f"not printed: {line!r}\n{output}"


def _is_close(*texts: str) -> bool:
    return math.isclose(*(float(text.replace(",", "")) for text in texts), rel_tol=TOLERANCE)


def test_the_commands_of_the_tutorial_print_what_it_shows(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    cut_model(folder / "quickstart_data" / MODEL_NAME)
    (making_the_model, _), *blocks = read_blocks()
    assert making_the_model == "python ../launch_scripts/quickstart_data.py quickstart_data\n"  # e2e/test_quickstart
    num_typed = 0
    for block, shown in blocks:
        output = ""
        for command in split_commands(block):
            if match := re.fullmatch(r"(?:echo (?P<input>.*) \| )?vcore-ds (?P<words>.*)", command):
                output += fork(shlex.split(match["words"]), folder, text="".join(shlex.split(match["input"] or "")))
            elif command.startswith(LAUNCHER) and num_typed > 0:
                output += fork(shlex.split(command.removeprefix(LAUNCHER)), folder, num_ranks=2)
            else:
                num_typed += command.startswith(LAUNCHER)
                output += type_command(command, folder)
        assert output.strip()
        if "vcore-ds chat" not in block:  # two layers do not answer sensibly
            check_output(shown, output, has_page_weights=False)
    assert num_typed == 1
    losses = [json.loads((folder / "runs" / run / "held_out.json").read_text()) for run in ("mine", "kept")]
    assert losses[0]["before"] == losses[1]["before"]
    assert all(loss["after"][""] < loss["before"][""] for loss in losses)
    assert (folder / "runs" / "mine" / "report.html").is_file() and (folder / "model" / "model.safetensors").is_file()


def cut_model(target: Path) -> None:
    """Write the quickstart's model with only its first layers."""
    source = DATA / MODEL_NAME
    if not (source / "config.json").is_file():
        prepare_quickstart_data(DATA)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": NUM_LAYERS}))
    is_cut = re.compile(rf"model\.layers\.(?!({'|'.join(map(str, range(NUM_LAYERS)))})\.)").match
    weights = {name: tensor for name, tensor in load_file(source / "model.safetensors").items() if not is_cut(name)}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def type_command(command: str, folder: Path) -> str:
    """Run a command in bash in `folder`; returns its output."""
    while True:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=command_environment() | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if f"port: {DEEPSPEED_PORT}" not in done.stdout or "EADDRINUSE" not in done.stdout:
            assert done.returncode == 0, done.stdout
            return done.stdout
        # Another program uses the port.
        wait_until(lambda: not is_listened_on(DEEPSPEED_PORT), f"free port {DEEPSPEED_PORT}", every_seconds=1)


def fork(words: list[str], folder: Path, *, num_ranks: int = 1, text: str = "") -> str:
    """Run a command of the package in `folder` with `text` on standard input; returns its output."""
    with ForkedJob(main_in, [str(folder), text, *words], folder.parent / "log", num_ranks=num_ranks) as job:
        assert job.wait() == 0, job.output
    return job.output


def main_in(words: list[str]) -> int:
    folder, text, *arguments = words
    os.chdir(folder)
    read_end, write_end = os.pipe()
    os.write(write_end, text.encode())
    os.close(write_end)
    os.dup2(read_end, 0)
    return main(arguments)


def type_page(folder: Path) -> None:
    """Run the page as a reader would; raises AssertionError at the first difference."""
    folder.mkdir(parents=True)
    for block, shown in read_blocks():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        output = type_command(block, folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"\n{block}\n{output}\n{seconds:.0f} CPU seconds", flush=True)
        check_output(shown, output, has_page_weights=True)


if __name__ == "__main__":
    type_page(Path(sys.argv[1]))
