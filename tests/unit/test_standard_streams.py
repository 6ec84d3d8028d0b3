"""Commands where standard streams are closed, full or of another encoding, and in working folders that are gone or hold
files with the names of Python's modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import REPOSITORY, command_environment
from tests.helpers.report_runs import step_line, write_run
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.cli import main
from vcore_ds.training import console

MODULE = "python -m vcore_ds"
FULL = "vcore-ds: standard output: cannot be written: No space left on device"
REMOVED = "mkdir gone; cd gone; rmdir ../gone;"

# Line of a shell | exit code | part of the output
LINES = f"""
{MODULE} keys method >&- | 0 |
{MODULE} keys method <&- >&- 2>&- | 0 |
{MODULE} keys method > /dev/full | 2 | {FULL}
python -u -m vcore_ds keys method > /dev/full | 2 | {FULL}
{MODULE} check missing 2> /dev/full | 2 |
{MODULE} check missing 2>&- | 2 |
{MODULE} check missing | 2 | vcore-ds: missing: found no such file
{REMOVED} {MODULE} recipes | 2 | working folder
{REMOVED} bash {REPOSITORY}/launch_scripts/train_32b.sh | 2 | working folder
{REMOVED} bash {REPOSITORY}/launch_scripts/quickstart.sh | 2 | working folder
"""


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_commands_stand_up_to_streams_and_working_folders(tmp_path: Path, line: str) -> None:
    for name in ("queue.py", "socket.py", "signal.py"):  # for Python they would hide its own
        (tmp_path / name).write_text("raise SystemExit('a file of the user has run')\n")
    command, code, part = (word.strip() for word in line.rsplit("|", 2))
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=command_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == int(code), done.stderr
    assert part in done.stderr and "Traceback" not in done.stderr and "of the user" not in done.stdout + done.stderr


def test_a_closed_stream_does_not_lend_its_number_to_a_file(tmp_path: Path) -> None:
    """Libraries print to descriptor 1."""
    code = (
        "import os; from vcore_ds.common.standard_streams import repair_standard_streams\n"
        "repair_standard_streams(); repair_standard_streams()\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); os.write(1, b'from a library'); print('α')"
    )
    done = subprocess.run(["bash", "-c", f'"{sys.executable}" -c "$0" >&-', code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stream_escapes_what_its_encoding_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    write_run(tmp_path / "run", make_tokenizer(), [step_line(1), step_line(2)], {})
    (tmp_path / "output").touch()
    with open(tmp_path / "output", "w", encoding=encoding) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["report", "--text", str(tmp_path / "run")]) == 0
        console.say("s 0.1±0.2 → α")  # as a line of a step
    assert "2.0000 \\u2192 1.0000" in (tmp_path / "output").read_text(encoding=encoding)


def test_a_full_log_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.open("/dev/full", os.O_WRONLY), "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console.say("step 1/2")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


LONG = "x" * 300


@pytest.mark.parametrize(
    "line",
    ["report NAME", "score NAME", "plan NAME --gpus 1", "sweep NAME", "export NAME", "keep NAME --top 0.1 --output o"],
)
def test_a_name_that_is_too_long_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.replace("NAME", LONG).split()) == 2
    message = capsys.readouterr().err
    assert message.startswith("vcore-ds: ") and LONG[:50] in message and list(tmp_path.iterdir()) == []
