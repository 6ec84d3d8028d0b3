"""`make gpu` without a GPU: the parts that it runs, stops, keeps and skips, here of plain Python."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gpu.comparison import compare_devices
from tests.gpu.node.session import choose_num_ranks, make_parts
from tests.gpu.parts import PARTS, RESULTS, Part
from tests.gpu.session import REPOSITORY, Run, Session, choose_parts, kill_with_children, make_environment

WHERE = {"commit": "0123456789ab", "device": "1 x a GPU", "date": "2026-11-27"}


def python(name: str, code: str, stage: int = 0, **options: Any) -> Part:
    return Part(name, f"Does {name} work?", ("-c", code, RESULTS), stage, **options)


def make_session(parts: list[Part], output: Path) -> Session:
    return Session(parts, output, seconds=600, num_jobs=4, environment=make_environment(os.environ), where=WHERE)


def run(parts: list[Part], output: Path) -> Session:
    session = make_session(parts, output)
    session.run()
    return session


def states(session: Session) -> dict[str, str]:
    return {run.part.name: run.state for run in session.runs}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def session(output: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """One session with an end of every kind."""
    skipped = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "--noconftest", "-c", os.devnull)
    skipping = tmp_path_factory.mktemp("tests") / "test_skips.py"
    skipping.write_text("import pytest\ndef test_nothing():\n    pytest.skip('needs a GPU')\n")
    parts = [
        python("gate", "print('ok gate')", is_gate=True),
        python("works", "import sys, pathlib; folder = pathlib.Path(sys.argv[1], 'works'); folder.mkdir(); "
               "(folder / 'results.md').write_text('| a | b |')", 1),
        python("fails", "print('why'); raise SystemExit(3)", 1),
        python("hangs", "import time; time.sleep(600)", 1, limit_seconds=1),
        Part("skips", "Was anything tested?", (*skipped, str(skipping)), 1),
        python("long", "pass", 2, needed_seconds=10_000),
        python("short", "print('ok short')", 3),
    ]  # fmt: skip
    return run(parts, output)


def test_each_part_ends_as_it_should_and_is_in_the_summary(session: Session, output: Path) -> None:
    assert states(session) == {
        "gate": "passed", "works": "passed", "fails": "failed (3)", "hangs": "stopped", "skips": "skipped",
        "long": "no time (10000 s needed)", "short": "passed",
    }  # fmt: skip
    assert not session.has_passed()
    summary = (output / "summary.md").read_text()
    assert "| a | b |" in summary and "why" in summary and "ok short" not in summary and WHERE["device"] in summary
    assert json.loads((output / "summary.json").read_text())["parts"]["fails"] == "failed (3)"
    assert (output / "logs" / "fails.log").read_text() == "why\n" and (output / "results" / "works").is_dir()


def test_a_stopped_part_prints_its_stacks_and_leaves_no_process() -> None:
    code = (
        "import subprocess, sys, time\n"
        "silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"  # two stacks at once would mix
        "rank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True, "
        "**silent)\n"
        "def wait_for_ever():\n"
        "    print(rank.pid, flush=True)\n"
        "    time.sleep(600)\n"
        "wait_for_ever()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=make_environment(os.environ)
    )
    assert process.stdout is not None
    rank = int(process.stdout.readline())
    kill_with_children(process)
    assert b"in wait_for_ever" in process.stdout.read()
    assert not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE
    process.stdout.close()


def test_nothing_follows_a_failed_gate(tmp_path: Path) -> None:
    parts = [python("gate", "raise SystemExit(1)", is_gate=True), python("works", "pass", 1)]
    assert states(run(parts, tmp_path)) == {"gate": "failed (1)", "works": "not begun"}


def test_a_stage_runs_its_parts_at_the_same_time(tmp_path: Path) -> None:
    # Each waits for the file of the other.
    code = "import pathlib, sys, time\nfolder = pathlib.Path(sys.argv[1])\n(folder / '{}').touch()\n"
    code += "while not (folder / '{}').exists(): time.sleep(0.02)"
    parts = [python("one", code.format("a", "b")), python("two", code.format("b", "a"))]
    assert states(run(parts, tmp_path)) == {"one": "passed", "two": "passed"}


def test_the_deadline_stops_what_runs(tmp_path: Path) -> None:
    parts = [python("hangs", "import time; time.sleep(600)", needed_seconds=0)]
    session = make_session(parts, tmp_path)

    def begin_and_move(run: Run) -> None:
        begin(run)
        session.deadline = 0.0

    begin, session._begin = session._begin, begin_and_move
    session.run()
    assert states(session) == {"hangs": "stopped"}


def test_parts_are_chosen_by_their_beginning_and_by_gpus() -> None:
    names = [part.name for part in choose_parts(PARTS, ["steps", "kernel_rest"], 1)]
    assert names == ["packages", "steps_0", "steps_1", "steps_cpu_0", "kernel_rest"]
    default = {part.name for part in choose_parts(PARTS, [], 1)}
    assert "speed_8b" in default and not default & {"gathers", "calibrate", "speed_1.7b"}
    with pytest.raises(SystemExit, match="no part kernels"):
        choose_parts(PARTS, ["kernels"], 1)


def test_the_default_parts_fit_into_eight_minutes_as_measured() -> None:
    """Stages one after another, each as long as the time that its longest part needs; the rest of a call is for parts
    that take longer than usual."""
    default = choose_parts(PARTS, [], 1)
    stages = {part.stage for part in default}
    assert sum(max(part.needed_seconds for part in default if part.stage == stage) for stage in stages) < 480


@pytest.mark.parametrize("parts", [PARTS, *(make_parts(number) for number in (8, 4, 2))], ids=len)
def test_every_part_names_existing_files(parts: tuple[Part, ...]) -> None:
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        for argument in part.arguments:
            if argument.startswith("tests/"):
                assert (REPOSITORY / argument).is_file(), part.name
            elif argument.startswith("tests."):
                assert importlib.util.find_spec(argument) is not None, part.name


def test_the_runner_imports_the_standard_library_alone() -> None:
    code = "import sys, tests.gpu.session; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert imported - sys.stdlib_module_names == {"tests", "__main__"}


def test_a_node_uses_the_largest_power_of_two_of_its_gpus() -> None:
    assert [choose_num_ranks(number) for number in (1, 2, 3, 4, 7, 8, 9)] == [0, 2, 2, 4, 4, 8, 8]
    assert [part.name for part in make_parts(8) if "steps" in part.name] == ["steps_8", "steps_4"]
    assert [part.name for part in make_parts(2) if "steps" in part.name] == ["steps_2"]


def test_devices_are_compared_case_by_case(tmp_path: Path) -> None:
    def write(name: str, **cases: Any) -> None:
        lines = [json.dumps({"case": case, **measured}) for case, measured in cases.items()]
        (tmp_path / name).write_text("\n".join(lines) + "\n")

    def step(loss: float, utility_std: float = 1.0) -> dict[str, Any]:
        return {"straight": [{"loss": loss, "utility_std": utility_std}]}

    write("steps_cuda_0.jsonl", same=step(1.0), far=step(1.1), crashed={"error": "RuntimeError: why"})
    write("steps_cuda_1.jsonl", **{"stochastic rounding": step(1.0, 1.2), "nan": step(float("nan"))})
    write("steps_cpu_0.jsonl", same=step(1.0), far=step(1.0), crashed=step(1.0), nan=step(1.0))
    text, failures = compare_devices(tmp_path)
    assert "| same | 0.0e+00 |  |" in text
    assert any("crashed" in line and "GPU: RuntimeError: why" in line for line in text)
    assert any("stochastic" in line and "CPU: not measured" in line for line in text)
    assert [failure.partition(":")[0] for failure in failures] == ["steps, far", "steps, nan"]

    run = {"straight": [{"loss": 2.0, "grad_norm": 1.0}], "resumed": [{"loss": 2.0, "grad_norm": 1.001}]}
    write("runs_cuda_0.jsonl", bf16=run, fp32=run)
    write("runs_cpu_0.jsonl", bf16=run, fp32=run)
    assert [failure.partition(":")[0] for failure in compare_devices(tmp_path)[1]][2:] == ["runs, fp32"]
