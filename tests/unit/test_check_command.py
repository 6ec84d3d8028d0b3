"""`vcore-ds check` and `vcore-ds --help`: quick to start, and readable."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vcore_ds.cli import COMMANDS, main

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "launch_scripts" / "recipes" / "qwen3_4b_math_lora.yaml"


def test_check_imports_nothing_heavy(tmp_path: Path) -> None:
    """A recipe is checked while it is typed; torch alone takes longer to import than all of the check."""
    code = (
        "import sys\n"
        "from vcore_ds.cli import main\n"
        "code = main(['check', *sys.argv[1:]])\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "heavy = loaded & {'torch', 'transformers', 'deepspeed', 'peft', 'pyarrow', 'numpy', 'datasets', 'wandb'}\n"
        "print('loaded:', *sorted(heavy), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(RECIPE), f"run.output_dir={tmp_path}/new", "--ranks", "8"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.returncode) == ("loaded:\n", 0)
    assert "\nBatch: 32 sequences a step" in done.stdout


def test_help_lists_every_command_on_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for name, command in COMMANDS.items():
        assert [name, command.HELP] in lines


@pytest.mark.parametrize("word", ["0", "-1", "2147483648", "9" * 5000, "1.0", "two", ""])
def test_a_number_of_ranks_that_is_none(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", str(RECIPE), f"--ranks={word}"])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert "vcore-ds check: error: argument --ranks: found " in captured.err and "expected " in captured.err
    assert captured.out == "" and len(captured.err) < 500


def test_the_largest_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(RECIPE), "batch.packed_row_tokens=null", "--ranks", "2147483647"]) == 2
    assert "nearest that work: batch.global_size 2147483647" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["recipes"], ["check", str(RECIPE)]], ids=["recipes", "check"])
def test_a_reader_that_leaves_ends_a_command_quietly(words: list[str], tmp_path: Path) -> None:
    """As in `vcore-ds recipes | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "vcore_ds.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with open(writing, "wb") as output:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_another_broken_pipe_is_no_reader_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_connection(_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(COMMANDS["recipes"], "main", lose_a_connection)
    with open(os.devnull, "w") as output, pytest.raises(BrokenPipeError):
        monkeypatch.setattr(sys, "stdout", output)
        main(["recipes"])
