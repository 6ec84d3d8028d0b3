"""`make gpu` without a GPU: the parts that it runs, stops, keeps and skips, here of plain Python."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.gpu import session
from tests.gpu.node.session import choose_num_ranks, make_parts
from tests.gpu.session import Part, read_outcome, run_parts

PARTS = {
    "counts": Part("Does it run once?", ("-c", "import sys; open(sys.argv[1], 'a').write('x')", "FILE")),
    "fails": Part("Does a failure end the others?", ("-c", "print('why'); raise SystemExit(3)")),
    "last": Part("Does what follows run?", ("-c", "print('done')")),
}


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Part]:
    counts = PARTS["counts"]
    return {**PARTS, "counts": Part(counts.question, (*counts.arguments[:-1], str(tmp_path / "count")))}


def test_parts_run_in_separate_processes_and_are_kept(parts: dict[str, Part], tmp_path: Path) -> None:
    folder, where = tmp_path / "results", {"commit": "abc", "device": "a GPU"}
    outcomes = run_parts(parts, folder, **where)
    assert [outcome.exit_code for outcome in outcomes] == [0, 3, 0]
    failed = read_outcome(folder, "fails")
    assert failed is not None and "why" in failed.output and not failed.passed
    page = (folder / "gpu.md").read_text()
    assert page.count("| passed |") == 2 and "| failed (3) |" in page

    run_parts(parts, folder, **where)
    assert (tmp_path / "count").read_text() == "x"  # passed already
    run_parts(parts, folder, commit="def", device="a GPU")
    assert (tmp_path / "count").read_text() == "xx"  # other code
    run_parts(parts, folder, commit="def", device="a GPU", chosen=["counts"])
    assert (tmp_path / "count").read_text() == "xxx"  # asked for


def test_a_part_is_killed_with_its_ranks() -> None:
    code = (
        "import subprocess, sys\n"
        "rank = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(rank.pid, flush=True)\n"
        "rank.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    rank = psutil.Process(int(process.stdout.readline()))
    session.kill_with_ranks(process)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    process.stdout.close()


def test_a_part_that_hangs_is_stopped(tmp_path: Path) -> None:
    hanging = {"hangs": Part("Is it stopped?", ("-c", "import time; time.sleep(600)"))}
    (outcome,) = run_parts(hanging, tmp_path, commit="abc", device="a GPU", part_seconds=1)
    assert outcome.exit_code is None and session.describe_end(outcome) == "stopped"
    assert "| stopped |" in (tmp_path / "gpu.md").read_text()


def test_no_part_begins_that_might_not_end_in_time(parts: dict[str, Part], tmp_path: Path) -> None:
    assert run_parts(parts, tmp_path / "results", commit="abc", device="a GPU", minutes=1, part_seconds=600) == []
    assert not (tmp_path / "count").exists()


@pytest.mark.parametrize("parts", [session.PARTS, *(make_parts(number) for number in (8, 4, 2))])
def test_every_part_names_existing_files(parts: dict[str, Part]) -> None:
    for name, part in parts.items():
        for argument in part.arguments:
            if argument.startswith("tests/"):
                assert (session.REPOSITORY / argument).is_file(), name
            elif argument.startswith("tests."):
                assert (session.REPOSITORY / (argument.replace(".", "/") + ".py")).is_file(), name


def test_outcomes_are_json(parts: dict[str, Part], tmp_path: Path) -> None:
    run_parts({"last": parts["last"]}, tmp_path, commit="abc", device="a GPU")
    assert json.loads((tmp_path / "last.json").read_text())["command"] == shlex.join(["python", "-c", "print('done')"])


def test_a_node_uses_the_largest_power_of_two_of_its_gpus() -> None:
    assert [choose_num_ranks(number) for number in (1, 2, 3, 4, 7, 8, 9)] == [0, 2, 2, 4, 4, 8, 8]
    assert [name for name in make_parts(8) if "steps" in name] == ["steps_8", "steps_4"]
    assert [name for name in make_parts(2) if "steps" in name] == ["steps_2"]


def test_a_table_that_a_part_writes_is_on_the_page(tmp_path: Path) -> None:
    code = "import os, pathlib; folder = pathlib.Path(os.environ['VCORE_DS_GPU_RESULTS'], 'tables'); folder.mkdir(); "
    code += "(folder / 'results.md').write_text('| a | b |')"
    run_parts({"tables": Part("Is it there?", ("-c", code))}, tmp_path, commit="abc", device="GPUs", page="gpu8.md")
    assert "\n| a | b |" in (tmp_path / "gpu8.md").read_text()
