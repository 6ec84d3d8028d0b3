"""`vcore-ds check` and `vcore-ds --help`: quick to start, and readable."""

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
