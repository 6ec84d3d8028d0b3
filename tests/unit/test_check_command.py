"""`vcore-ds check` and `vcore-ds --help`: quick to start, and readable."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config

from tests.helpers.commands import HANG_SECONDS
from tests.helpers.setups import sums, write_conversations, write_model
from vcore_ds.commands.cli import COMMANDS, main
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.data.prepare import convert, report

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "launch_scripts" / "recipes" / "qwen3_4b_math_lora.yaml"


def test_check_imports_nothing_heavy(tmp_path: Path) -> None:
    """A recipe is checked while it is typed; torch alone takes longer to import than all of the check."""
    code = (
        "import sys\n"
        "from vcore_ds.commands.cli import main\n"
        "code = main(['check', *sys.argv[1:]])\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "heavy = loaded & {'torch', 'transformers', 'deepspeed', 'peft', 'pyarrow', 'numpy', 'datasets', 'wandb'}\n"
        "print('loaded:', *sorted(heavy), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(RECIPE), f"run.output_dir={tmp_path}/new", "--ranks", "8"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_SECONDS)
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
def test_an_invalid_number_of_ranks_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", str(RECIPE), f"--ranks={word}"])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert "vcore-ds check: error: argument --ranks: found " in captured.err and "expected " in captured.err
    assert captured.out == "" and len(captured.err) < 500


def test_an_output_folder_that_cannot_be_written_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for output in ("x" * 300, "/dev/null/x"):
        assert main(["check", str(RECIPE), f"run.output_dir={output}"]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"vcore-ds: run.output_dir: {output[:200]}") and "cannot be written: " in message


def test_the_largest_number_of_ranks_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(RECIPE), "batch.pack_tokens_per_rank=null", "--ranks", "2147483647"]) == 0
    assert "2,147,483,615 idle ranks" in capsys.readouterr().out


TENSOR = RECIPE.with_name("qwen3_32b_math_full_tensor8.yaml")
REPORTS = [  # words, and beginnings of all lines
    """RECIPE model.path=MODEL probe.batch_size=4 --ranks 64
    Valid: RECIPE on 64 ranks
    Batch: 32 sequences a step on 64 ranks, in packs of at most 16,384 tokens
    Balance of the main batch: sequence-parallel size 8; slowest rank 1.
    Balance of the probe batch: sequence-parallel size 8; slowest rank
    Warning: the probe batch leaves much of the ranks' time unused: set probe.batch_size to 64
    Assumed: lengths of typical reasoning traces (lognormal, mean 2,970 tokens, cut at 16,384)
    Not on this machine, but needed where the recipe runs: data.train_path data/math""",
    """RECIPE model.path=nobody/has-this --ranks 64
    Valid: RECIPE on 64 ranks
    Batch: 32 sequences a step on 64 ranks
    Balance and memory are not estimated: nobody/has-this is not on this machine and not
    Not on this machine""",
    """TENSOR data.cutoff_length=4096
    Valid: TENSOR on 8 ranks
    Batch: 32 sequences a step on 1 tensor-parallel group of 8 ranks, in packs of at most 65,536
    Tensor parallelism: groups of 8 ranks, which compute on the same packs.
    Balance of the main batch: sequence-parallel size 1; slowest rank 1.0
    ...""",
    """RECIPE model.path=Qwen/Qwen2.5-0.5B-Instruct --ranks 2
    ...Assumed: the layers and heads of Qwen2.5-0.5B by its name""",
    """RECIPE model.path=SHORT
    ...Warning: data.cutoff_length 16,384 is beyond the 4,096 positions""",
]


def write_short_model(folder: Path) -> Path:
    Qwen3Config(num_hidden_layers=2, max_position_embeddings=4096).save_pretrained(folder / "short")
    return folder / "short"


@pytest.mark.parametrize("report", REPORTS)
def test_check_reports_how_well_the_ranks_are_used(
    report: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "qwen3", "head_dim": 128}))
    words, *starts = [line.strip() for line in report.splitlines()]
    paths = {"RECIPE": RECIPE, "TENSOR": TENSOR, "MODEL": tmp_path, "SHORT": write_short_model(tmp_path)}
    for name, path in paths.items():
        words = words.replace(name, shlex.quote(str(path)))
        starts = [start.replace(name, str(path)) for start in starts]
    assert main(["check", *shlex.split(words), f"run.output_dir={tmp_path}/new"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for start in starts:  # `...`: other lines before it
        while start.startswith("...") and not lines[0].startswith(start[3:]):
            lines.pop(0)
        assert lines.pop(0).startswith(start.removeprefix("...")), start
    assert lines == [] or starts[-1].startswith("...")


def test_sizes_and_positions_of_the_model_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = f"run.output_dir={tmp_path}/new", "--ranks", "64", "batch.sequence_parallel=3"
    for recipe, ranks in ((RECIPE, "64 ranks"), (TENSOR, "8 tensor-parallel groups of 8 ranks")):
        assert main(["check", str(recipe), *words]) == 2
        assert f"batch.sequence_parallel: found 3 on {ranks}; expected auto or" in capsys.readouterr().err
    assert (
        main(["check", str(RECIPE), words[0], f"model.path={write_short_model(tmp_path)}", "data.cutoff_length=4096"])
        == 0
    )
    assert "beyond" not in capsys.readouterr().out


def test_check_warns_of_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(RECIPE, [f"run.output_dir={tmp_path}/run"])
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text(dump_recipe(recipe))
    words = ["check", str(RECIPE), f"run.output_dir={tmp_path}/run"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(
        f"Warning: run.output_dir: {tmp_path}/run: holds a run that has finished, with its result"
    )
    assert "Set run.output_dir" in lines[1] and lines[2].startswith("Batch: ")
    assert main([*words, "checkpoint.resume=never"]) == 2  # anything else is refused as before
    assert "holds another run" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text("def weights(losses):\n    return losses[:1]\n")
    function = ["method.name=custom", "method.kl_budget=null", f"method.function={tmp_path}/mine.py:weights"]
    assert main([*words, "probe.every=2", *function]) == 2  # both, of the folder and of the function
    error = capsys.readouterr().err
    assert f"run.output_dir: {tmp_path}/run" in error and f"{tmp_path}/mine.py:weights" in error


@pytest.mark.parametrize("words", [["recipes"], ["check", str(RECIPE)]], ids=["recipes", "check"])
def test_a_reader_that_leaves_ends_a_command_quietly(words: list[str], tmp_path: Path) -> None:
    """`vcore-ds recipes | head -1` closes the pipe in this way."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "vcore_ds", *words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with open(writing, "wb") as output:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_SECONDS,
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_another_broken_pipe_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_connection(_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(COMMANDS["recipes"], "main", lose_a_connection)
    with open(os.devnull, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError):
            main(["recipes"])


def test_wrong_arguments_name_what_is_missing_and_how_to_replace_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check"])
    assert capsys.readouterr().err.endswith("the following arguments are required: recipe\n")
    for words, hint in {
        "check RECIPE --batch.global_size=8": "batch.global_size=8",
        "train RECIPE --learning_rate 1e-4": "optimizer.learning_rate=1e-4",
        "train --learning-rate=1e-4": "optimizer.learning_rate=1e-4",
        "train --per_device_train_batch_size 2 RECIPE": "batch.micro_batch_size_per_rank=2",
        "check --bf16 RECIPE": "model.precision=VALUE",
        "train --config RECIPE": "train RECIPE.yaml",
        "train --num_gpus 2 RECIPE": "deepspeed --num_gpus",
        "check RECIPE --use_dora": "lora.alpha",
        "plan RECIPE --num_gpus 8": "--gpus",  # though --gpus is required
        "check RECIPE --rankss 2": "--ranks",
        "eval RUN --output_dir here": "--output",
        "chat RUN --zzzzzz 1": "--help",
    }.items():
        assert main(words.replace("RECIPE", str(RECIPE)).split()) == 2
        assert hint in capsys.readouterr().err, words


def test_check_reads_raw_rows_once_without_datasets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The import of `datasets`, with that of pandas, took as long as rendering 350 rows six times, as check did."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    model, examine, examined = write_model(tmp_path / "model"), convert.examine_row, list[int]()
    for module in (convert, report):
        monkeypatch.setattr(module, "examine_row", lambda *words: examined.append(words[0].number) or examine(*words))
    data = write_conversations(tmp_path / "rows.jsonl", sums(range(5)))
    words = [f"model.path={model}", f"data.train_path={data}", f"run.output_dir={tmp_path}/new", "batch.global_size=12"]
    assert main(["check", str(RECIPE), "methods/sft.yaml", *words, f"data.cache_dir={tmp_path}/cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert examined == [0, 1, 2, 3, 4] and f"Data: {data}: 5 rows" in lines
    assert "Warning: batch.global_size: a step takes the training data 2.4 times; expected at most once" in lines
    assert any(line.startswith(f"Data: the 5 sequences of {data}, mean ") for line in lines)


def test_check_reports_how_rows_are_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "score": 3}]
    data.write_text("\n".join([json.dumps({"conversations": turns, "id": 7}), json.dumps({"text": "q"})]))
    assert main(["check", str(RECIPE), f"data.train_path={data}", f"run.output_dir={tmp_path}/new"]) == 0
    start = f"Data: {data}: "
    lines = [line[len(start) :] for line in capsys.readouterr().out.splitlines() if line.startswith(start)]
    malformed = f"1 malformed rows are left out; the first: {data}:2: found the keys text; expected `messages`"
    assert lines.pop(2).startswith(malformed)
    assert lines == ["2 rows", "format ShareGPT 1", "ignored: `id` 1"]
