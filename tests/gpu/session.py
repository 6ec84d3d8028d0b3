"""The first command to run on a machine with a GPU: does it compute, does a run work, how fast is it.

    make gpu                                   the parts of a first call, in at most eight minutes
    make gpu SECONDS=170 ONLY="steps kernel"   parts whose names begin so, after a fix
    python -m tests.gpu.session --list         the parts
    python -m tests.gpu.session --rehearse     on a machine without a GPU: parts fail for lack of one, the rest is real

Parts of a stage run at the same time, stages one after another: correctness first, since imports and compilations of
many processes share the cores, then timings, each alone. There is one deadline. A part that no longer fits is skipped
and the next one is tried. At its limit, every process of a part prints its stacks before it is killed.

The output folder has summary.md, summary.json, `logs` and `results`, which are there while parts run. Only the standard
library is imported here: where the packages do not import, the first part says so.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from tests.gpu.comparison import compare_devices
from tests.gpu.parts import PARTS, RESULTS, Part

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 480
SECONDS_TO_END = 8
"""Kept for stopping parts and for the summary."""
REHEARSAL_VARIABLE = "VCORE_DS_GPU_REHEARSAL"


@dataclass
class Run:
    """A part that is to run, runs, or has ended."""

    part: Part
    log: Path
    state: str = "not begun"
    seconds: float = 0.0
    began: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    notes: list[str] = field(default_factory=list)


class Session:
    """Runs parts within a deadline. `where` is commit, device and date, for the summary; `environment` is that of all
    parts, and `num_jobs` the number of parts of a stage that run at a time."""

    def __init__(
        self,
        parts: Sequence[Part],
        output: Path,
        *,
        seconds: float,
        num_jobs: int,
        environment: Mapping[str, str],
        where: Mapping[str, str],
    ):
        self.deadline = time.monotonic() + seconds
        self._output, self._num_jobs, self._environment, self._where = output, num_jobs, environment, where
        self._results, logs = output / "results", output / "logs"
        for folder in (self._results, logs):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self.runs = [Run(part, logs / f"{part.name}.log") for part in parts]

    def run(self) -> bool:
        """Run all parts; returns whether all have passed."""
        try:
            for stage in sorted({run.part.stage for run in self.runs}):
                runs = [run for run in self.runs if run.part.stage == stage]
                self._run_stage(runs)
                if any(run.part.is_gate and run.state != "passed" for run in runs):
                    print("Nothing else can run: mend this and call again.", flush=True)
                    break
        finally:
            kill_with_children(*(run.process for run in self.runs if run.process and run.process.poll() is None))
        print(self._write_summary(), flush=True)
        return self.has_passed()

    def has_passed(self) -> bool:
        return bool(self.runs) and all(run.state == "passed" for run in self.runs) and not self._compare()[1]

    def _run_stage(self, runs: list[Run]) -> None:
        while any(run.state in ("not begun", "running") for run in runs):
            for run in runs:
                if run.state == "not begun" and sum(other.state == "running" for other in runs) < self._num_jobs:
                    self._begin(run)
            time.sleep(0.1)
            overdue = []
            for run in runs:
                if run.process is None or run.state != "running":
                    continue
                exit_code = run.process.poll()
                if exit_code is not None:
                    self._end(run, _judge(run, exit_code))
                elif time.monotonic() > min(run.began + run.part.limit_seconds, self.deadline - SECONDS_TO_END):
                    overdue.append(run)
            kill_with_children(*(run.process for run in overdue if run.process is not None))
            for run in overdue:
                self._end(run, "stopped")

    def _begin(self, run: Run) -> None:
        if time.monotonic() + run.part.needed_seconds + SECONDS_TO_END > self.deadline:
            run.state = f"no time ({run.part.needed_seconds} s needed)"
            return
        run.began, run.state = time.monotonic(), "running"
        command = [sys.executable, *(word.replace(RESULTS, str(self._results)) for word in run.part.arguments)]
        with run.log.open("wb") as log:
            run.process = subprocess.Popen(
                command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**self._environment, RESULTS: str(self._results), **run.part.variables},
            )  # fmt: skip

    def _end(self, run: Run, state: str) -> None:
        run.state, run.seconds = state, time.monotonic() - run.began
        run.notes = _choose_notes(run)
        print(f"{run.part.name}: {state} after {run.seconds:.0f} s", flush=True)
        self._write_summary()

    def _compare(self) -> tuple[list[str], list[str]]:
        return compare_devices(self._results)

    def _write_summary(self) -> str:
        """Write summary.md and summary.json; returns the former."""
        tables, failures = self._compare()
        lines = [f"{name}: {value}" for name, value in self._where.items()]
        lines += ["", "| part | question | result | s |", "|---|---|---|---|"]
        lines += [f"| {run.part.name} | {run.part.question} | {run.state} | {run.seconds:.0f} |" for run in self.runs]
        lines += tables + [f"**{failure}**" for failure in failures]
        for run in self.runs:
            if run.notes:
                command = shlex.join(["python", *run.part.arguments])
                lines += ["", f"## {run.part.name}: {run.state}", f"`{command}`", "```", *run.notes, "```"]
        for page in sorted(self._results.glob("*/*.md")):
            lines += ["", page.read_text(encoding="utf-8")]
        text = "\n".join(lines) + "\n"
        states = {run.part.name: run.state for run in self.runs}
        content = {**self._where, "parts": states, "failed comparisons": failures}
        (self._output / "summary.md").write_text(text, encoding="utf-8")
        (self._output / "summary.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return text


def _judge(run: Run, exit_code: int) -> str:
    if exit_code != 0:
        return f"failed ({exit_code})"
    # pytest's exit code is 0 if all tests were skipped, which shows nothing.
    if "pytest" in run.part.arguments and not re.search(rb"\d+ passed", run.log.read_bytes()):
        return "skipped"
    return "passed"


NOTED = re.compile(
    r"(FAILED|ERROR|E  |ok |bad |error:|\d+ (passed|failed)|=+ .*(passed|failed|error))|.*(Error|Exception)\b.*:"
)


def _choose_notes(run: Run) -> list[str]:
    """Lines for the summary: results and errors, else the log's end."""
    if run.state == "passed":
        return []
    lines = [line.strip()[:220] for line in run.log.read_text(errors="replace").splitlines() if line.strip()]
    return [line for line in lines if NOTED.match(line)][-14:] or lines[-4:]


def kill_with_children(*processes: subprocess.Popen[bytes]) -> None:
    """Let the processes of parts print the stacks of their threads (PYTHONFAULTHANDLER), then kill them, also those in
    other sessions: a rank that survives would hold the GPU's memory."""
    pids = [pid for process in processes for pid in _list_with_children(process.pid)]
    for number, seconds in ((signal.SIGABRT, 5.0), (signal.SIGKILL, 0.5)):
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(_is_running(pid) for pid in pids):
            for process in processes:
                process.poll()
            time.sleep(0.05)
    for process in processes:
        process.wait()


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _list_with_children(pid: int) -> list[int]:
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    pids = [pid]
    for parent in pids:
        pids += [child for child, its_parent in parents.items() if its_parent == parent]
    return pids


def make_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment of parts: unbuffered logs, stacks at SIGABRT, no network, two threads for each process."""
    return {
        **variables, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled", "NCCL_DEBUG": "WARN", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2",
    }  # fmt: skip


def _read_output(*command: str) -> str:
    """What a command prints; empty if it fails or is not there."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.strip()
    return ""


def choose_parts(parts: Sequence[Part], names: Sequence[str], num_gpus: int) -> list[Part]:
    """The parts whose names begin with one of `names`, and the gate; without names the default ones that have GPUs
    enough."""
    if not names:
        return [part for part in parts if part.is_default and part.num_gpus <= max(1, num_gpus)]
    unknown = [name for name in names if not any(part.name.startswith(name) for part in parts)]
    if unknown:
        sys.exit(f"error: no part {', '.join(unknown)}; expected {', '.join(part.name for part in parts)}")
    return [part for part in parts if part.is_gate or part.name.startswith(tuple(names))]


def read_arguments(
    description: str, output: str, seconds: float, parser: argparse.ArgumentParser
) -> argparse.Namespace:
    """Read the arguments that `make gpu` and `make gpu8` share; `output` and `seconds` are defaults."""
    parser.description, parser.formatter_class = description, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="parts whose names begin so")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"until the deadline (default {seconds})")
    parser.add_argument("--output", type=Path, default=Path(output), help=f"folder of the results (default {output})")
    parser.add_argument("--jobs", type=int, default=max(2, os.cpu_count() or 2), help="parts of a stage at a time")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    return parser.parse_args()


def list_parts(parts: Sequence[Part]) -> NoReturn:
    for part in parts:
        print(f"{part.name:18s}{part.question}\n{'':18s}{shlex.join(['python', *part.arguments])}")
    sys.exit(0)


def run_session(
    parts: Sequence[Part], arguments: argparse.Namespace, environment: Mapping[str, str], device: str, num_gpus: int
) -> NoReturn:
    """Run the chosen parts and exit: 0 if all have passed."""
    where = {
        "commit": _read_output("git", "describe", "--always", "--dirty=+", "--abbrev=12"),
        "device": device,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(sys.orig_argv),
    }
    chosen = choose_parts(parts, arguments.only, num_gpus)
    options = dict(seconds=arguments.seconds, num_jobs=arguments.jobs, environment=environment, where=where)
    passed = Session(chosen, arguments.output, **options).run()
    print(f"Results: {arguments.output}")
    sys.exit(0 if passed else 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rehearse", action="store_true", help="go on without a GPU")
    arguments = read_arguments(str(__doc__), "runs/gpu", SECONDS, parser)
    if arguments.list:
        list_parts(PARTS)
    environment = make_environment(os.environ)
    environment.pop("DS_ACCELERATOR", None)  # of the shell: everything would stay on the CPU
    if arguments.rehearse:
        environment[REHEARSAL_VARIABLE] = "1"
    gpus = _read_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    run_session(PARTS, arguments, environment, f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU", len(gpus))


if __name__ == "__main__":
    main()
