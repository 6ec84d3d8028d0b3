"""The first command to run on a machine with a GPU: does it compute, does a run work, how fast is it.

    make gpu                                       all parts, in the order of their value
    python -m tests.gpu.session --list             the parts
    python -m tests.gpu.session --only kernel      some of them, even if they have passed
    python -m tests.gpu.session --minutes 10       stops before a part that might not end in time

Every part is a separate process and is stopped after PART_SECONDS. Its output and exit code are kept in files under
`runs/gpu/`, which the next call reads: a part that has passed on this commit and this device is not run again.
`runs/gpu/gpu.md` is rewritten after each part.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from tests.gpu.results import RESULTS_VARIABLE, describe_devices
from tests.helpers.commands import REPOSITORY

FOLDER = REPOSITORY / "runs" / "gpu"
PAGE = "gpu.md"
PART_SECONDS = 570
"""Time after which a part is stopped; machines are lent for ten minutes at a time."""
TAIL_CHARACTERS = 4000


@dataclass(frozen=True)
class Part:
    """A command and the question that it answers."""

    question: str
    arguments: tuple[str, ...]
    """Arguments of Python."""


def _tests(*files: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *(f"tests/gpu/{file}" for file in files))


def _speed(*options: str) -> tuple[str, ...]:
    return ("-m", "tests.benchmarks.gpu", *options)


PARTS: dict[str, Part] = {
    "attention": Part("Does attention with a gradient equal fp64?", _tests("test_attention.py")),
    "kernel": Part("Does the kernel with a tangent equal fp64, at every tile?", _tests("test_flash_tangent.py")),
    "steps": Part("Does a step of every method and estimator equal the CPU's?", _tests("test_steps.py")),
    "small": Part(
        "Does a real shape train, and are utilities in bf16 right?",
        _speed("--shape", "0.6b", "--layers", "8", "--tokens", "8192", "--rounds", "2"),
    ),
    "waits": Part("How often does the host wait in a step?", _tests("test_synchronisations.py")),
    "runs": Part("Do runs equal the CPU's, and resume?", _tests("test_runs.py")),
    "memory": Part("Is the memory of a step what is estimated?", _tests("test_memory.py")),
    "overlap": Part("Are all-gathers and reduce-scatters on separate streams right?", _tests("test_overlap.py")),
    "transformer_engine": Part("Are TransformerEngine's norms right?", _tests("test_transformer_engine.py")),
    "pretrained": Part("How right are utilities on a pretrained model?", ("-m", "tests.gpu.pretrained")),
    "speed_0.6b": Part("How fast is a step of 0.6B?", _speed("--shape", "0.6b", "--rounds", "5")),
    "speed_1.7b": Part("How fast is a step of 1.7B?", _speed("--shape", "1.7b", "--rounds", "5")),
    "speed_8b": Part(
        "How fast is a step of the 8B shape, cut to 8 layers?",
        _speed("--shape", "8b", "--layers", "8", "--rounds", "3"),
    ),
    "gathers": Part(
        "Are sequential all-gathers faster on all GPUs of this machine?",
        (
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu"),
            *_speed("--shape", "1.7b", "--rounds", "5", "--methods", "sft", "jvp, fused", "--deepspeed-config"),
            *("zero3_bf16_large.json", "zero3_bf16_sequential.json"),
        ),
    ),
    "calibrate": Part("What do these numbers say of the plan of another run?", ("-m", "tests.gpu.calibrate")),
}
"""In the order of their value: what would crash first, what would be silently wrong, what is slow. No name has a space,
for `make gpu ONLY="waits runs"`."""


@dataclass(frozen=True)
class Outcome:
    """Result of a part."""

    name: str
    commit: str
    device: str
    date: str
    """UTC."""
    command: str
    seconds: float
    exit_code: int | None
    """None if it was stopped after PART_SECONDS."""
    output: str
    """Last TAIL_CHARACTERS characters; the log has all."""

    @property
    def passed(self) -> bool:
        return self.exit_code == 0


def run_parts(
    parts: Mapping[str, Part],
    folder: Path,
    *,
    commit: str,
    device: str,
    chosen: Sequence[str] = (),
    minutes: float | None = None,
    part_seconds: float = PART_SECONDS,
    page: str = PAGE,
    environment: Mapping[str, str] = os.environ,
) -> list[Outcome]:
    """Run the parts that have not passed yet; returns all outcomes so far.

    Args:
        chosen: names of the parts to run even if they have passed; empty for all that have not.
        minutes: no part begins that might not end in this time.
        page: name of the file with all outcomes.
        environment: variables of the parts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    for name, part in parts.items():
        earlier = read_outcome(folder, name)
        is_done = earlier is not None and earlier.passed and (earlier.commit, earlier.device) == (commit, device)
        if name not in chosen if chosen else is_done:
            continue
        if deadline is not None and time.monotonic() + part_seconds > deadline:
            print(f"{name}: not begun, it may take {part_seconds / 60:.0f} minutes", flush=True)
            break
        print(f"{name}: {part.question}", flush=True)
        options = dict(commit=commit, device=device, part_seconds=part_seconds)
        outcome = run_part(name, part, folder, environment, **options)
        print(
            f"    {describe_end(outcome)} after {outcome.seconds:.0f} s, output in {log_path(folder, name)}", flush=True
        )
        write_page(parts, folder, page)
    return [outcome for name in parts if (outcome := read_outcome(folder, name)) is not None]


def run_part(
    name: str,
    part: Part,
    folder: Path,
    environment: Mapping[str, str],
    *,
    commit: str,
    device: str,
    part_seconds: float,
) -> Outcome:
    """Run a part and write its log and its outcome to the folder."""
    command, started, log = [sys.executable, *part.arguments], time.monotonic(), log_path(folder, name)
    environment = {**environment, RESULTS_VARIABLE: str(folder)}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            exit_code: int | None = process.wait(part_seconds)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            if process.poll() is None:
                kill_with_ranks(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    outcome = Outcome(
        name,
        commit,
        device,
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        shlex.join(["python", *part.arguments]),
        time.monotonic() - started,
        exit_code,
        text[-TAIL_CHARACTERS:],
    )
    outcome_path(folder, name).write_text(json.dumps(asdict(outcome), indent=2), encoding="utf-8")
    return outcome


def kill_with_ranks(process: subprocess.Popen[Any]) -> None:
    """Kill a part and all processes below it: a rank that is left would hold the GPU's memory. torchrun starts each
    rank in a new session, which a signal to the process group does not reach."""
    parent = psutil.Process(process.pid)
    processes = [parent, *parent.children(recursive=True)]
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(processes, timeout=10)


def log_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def outcome_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def read_outcome(folder: Path, name: str) -> Outcome | None:
    """A part's outcome; None if it has not run."""
    path = outcome_path(folder, name)
    return Outcome(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def describe_end(outcome: Outcome) -> str:
    if outcome.passed:
        return "passed"
    return "stopped" if outcome.exit_code is None else f"failed ({outcome.exit_code})"


def write_page(parts: Mapping[str, Part], folder: Path, page: str) -> None:
    """Write a table of all parts, then the tables that each part wrote, or its last lines if there are none."""
    outcomes = {name: read_outcome(folder, name) for name in parts}
    lines = ["| part | question | result | seconds | device | date | commit |", "|---|---|---|---|---|---|---|"]
    for name, part in parts.items():
        outcome = outcomes[name]
        if outcome is None:
            lines.append(f"| {name} | {part.question} | not run | | | | |")
            continue
        lines.append(
            f"| {name} | {part.question} | {describe_end(outcome)} | {outcome.seconds:.0f} | {outcome.device} | "
            f"{outcome.date} | {outcome.commit} |"
        )
    for name, outcome in outcomes.items():
        if outcome is not None:
            tables = [path.read_text(encoding="utf-8") for path in sorted((folder / name).glob("*.md"))]
            lines += ["", f"## {name}", "", f"`{outcome.command}`", ""]
            lines += tables if tables and outcome.passed else ["```", outcome.output.strip(), "```"]
    (folder / page).write_text("\n".join(lines) + "\n", encoding="utf-8")


def current_commit() -> str:
    """The current commit, with `+` if files have changed since."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=REPOSITORY, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def read_arguments(
    description: str, parts: Mapping[str, Part], folder: Path, parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """The arguments of this command, after `--list` has been answered.

    Args:
        parser: a parser with further arguments.
    """
    parser = argparse.ArgumentParser() if parser is None else parser
    parser.description, parser.formatter_class = description, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=(), metavar="PART", help="run these, even if they have passed"
    )
    parser.add_argument("--minutes", type=float, help="start no part that might not end in this time")
    parser.add_argument("--output", type=Path, default=folder, help=f"folder of the results (default {folder})")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    arguments = parser.parse_args()
    if arguments.list:
        for name, part in parts.items():
            print(f"{name:20s}{part.question}\n{'':20s}{shlex.join(['python', *part.arguments])}")
        sys.exit(0)
    return arguments


def exit_with(outcomes: Sequence[Outcome], page: Path) -> NoReturn:
    print(f"Results: {page}")
    sys.exit(0 if outcomes and all(outcome.passed for outcome in outcomes) else 1)


def main() -> None:
    arguments = read_arguments(str(__doc__), PARTS, FOLDER)
    if not torch.cuda.is_available():
        sys.exit(
            f"make gpu: torch {torch.__version__} finds no GPU on {platform.node()}; what can be tested without one is "
            "in `make test`"
        )
    outcomes = run_parts(
        PARTS,
        arguments.output,
        commit=current_commit(),
        device=describe_devices(1),
        chosen=arguments.only,
        minutes=arguments.minutes,
    )
    exit_with(outcomes, arguments.output / PAGE)


if __name__ == "__main__":
    main()
