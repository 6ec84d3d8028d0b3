"""Mistakes of a user: one message that says what to do, exit code 2, and nothing written."""

import io
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.commands import REPOSITORY, UNUSED_GPU, add_unused_gpu, has_control_characters
from tests.helpers.jobs import ForkedJob
from tests.helpers.setups import TinySetup, make_tokenizer, write_conversations, write_model
from vcore_ds.commands.cli import main
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.training import model_card

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("one_process")]

RECIPES = REPOSITORY / "launch_scripts" / "recipes"
FULL = RECIPES / "qwen3_32b_math_full.yaml"

Refuses = Callable[..., str]


def read_files(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def refuses(setup: TinySetup, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> Refuses:
    """A function that runs a command with changes that it must refuse, and returns its output, the message last."""
    monkeypatch.chdir(REPOSITORY)

    def refuses(*changes: str, recipe: Path = FULL, command: tuple[str, ...] = ("train",)) -> str:
        before = read_files(tmp_path)
        overrides = setup.overrides(tmp_path / "output", *changes)
        capsys.readouterr()  # discard what the preparations of the test printed
        assert main([command[0], str(recipe), *command[1:], *overrides]) == UserError.EXIT_CODE == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("vcore-ds: ") and captured.err.count("vcore-ds: ") == 1
        assert "Traceback" not in captured.err
        assert read_files(tmp_path) == before
        return captured.out + captured.err

    return refuses


# Recipes


def test_all_problems_of_keys_are_one_message(refuses: Refuses, tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(FULL.read_text() + "\nwandb:\n  project: mine\nschedule:\n  warmup_ration: 0.1\n")
    line = recipe.read_text().splitlines().index("wandb:") + 1
    message = refuses("global_size=8", "optimizer.name=adam", recipe=recipe)
    assert f"{recipe}:{line}: wandb: found" in message and "expected a section among method, utility" in message
    assert f"{recipe}:{line + 3}: schedule.warmup_ration: found 0.1" in message
    assert 'did you mean "schedule.warmup_ratio"?' in message
    assert "override global_size=8: global_size: found 8" in message and '"batch.global_size"?' in message
    assert 'override optimizer.name=adam: optimizer.name: found "adam"; expected adamw, sgd or muon' in message


def test_misspelt_files_get_the_nearest_names(refuses: Refuses):
    message = refuses("methods/dtf.yaml", "batch.global_size", recipe=RECIPES / "qwen3_32b.yaml")
    assert "methods/dtf.yaml: found no such file; expected a recipe" in message and '"methods/dft.yaml"' in message
    assert "qwen3_32b.yaml: found no such file" in message and "qwen3_32b_math" in message
    assert 'override batch.global_size: found "batch.global_size"; expected section.key=value' in message


def test_a_deepspeed_json_that_contradicts_the_recipe_is_refused(refuses: Refuses, tmp_path: Path):
    json_file = tmp_path / "zero3.json"
    text = (REPOSITORY / "ds_configs" / "zero3_fp32.json").read_text()
    json_file.write_text(text.rstrip().removesuffix("}") + ', "gradient_clipping": 0.5, "train_batch_size": 4}')
    message = refuses(f"engine.deepspeed_config={json_file}", "model.precision=bf16")
    assert f"{json_file}: gradient_clipping: found 0.5; expected no such key" in message
    assert f"{json_file}: bf16.enabled: found false; expected no such key" in message
    assert "train_batch_size" not in message  # the same number is no contradiction


def test_two_ranks_give_one_message(setup: TinySetup, tmp_path: Path):
    """A sequence-parallel size of 4, which only a run on fewer ranks can refuse. `test_stops.py` tests how the
    deepspeed launcher passes an exit code on."""
    words = ["train", str(FULL), *setup.overrides(tmp_path / "output", "batch.sequence_parallel=4")]
    with ForkedJob(main, words, tmp_path / "log", num_ranks=2, rank_0_serves_store=True) as job:
        assert job.wait() == 2, job.output
    message = "vcore-ds: batch.sequence_parallel: found 4 on 2 ranks"
    assert job.output.count(message) == 1 and job.output.splitlines()[-1].startswith(message), job.output
    assert "Traceback" not in job.output and not has_control_characters(job.output)
    assert not (tmp_path / "output").exists()


# Data, models and folders


LORA = RECIPES / "qwen3_32b_math_lora.yaml"
BOTH = (("check",), ("train",))
LARGEST_ID = make_tokenizer().convert_tokens_to_ids("<|im_end|>")


def write_rows(folder: Path, train: Path, change: Callable[[list[str]], None]) -> None:
    lines = train.read_text().splitlines()
    change(lines)
    (folder / "train.jsonl").write_text("\n".join(lines))


def cut_weights(folder: Path, _: Path) -> None:
    weights = write_model(folder / "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def write_small_vocabulary(folder: Path, _: Path) -> None:
    tiny.qwen3(vocab_size=200).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")


def write_other_run(folder: Path, _: Path) -> None:
    (folder / "output").mkdir()
    (folder / "output" / "recipe.yaml").write_text("method: {}\n")


NO_CONTENT = '{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "text": "hi"}]}'
PREPARE: dict[str, Callable[[Path, Path], object]] = {
    "no rows": lambda folder, _: (folder / "train.jsonl").write_text("\n\n"),
    "no JSON": lambda folder, train: write_rows(folder, train, lambda rows: rows.insert(4, rows.pop(4)[:-5])),
    "no content": lambda folder, train: write_rows(folder, train, lambda rows: rows.insert(2, NO_CONTENT)),
    "small vocabulary": write_small_vocabulary,
    "no template": lambda folder, _: write_model(folder / "model", chat_template=None),
    "no weights": lambda folder, _: (write_model(folder / "model") / "model.safetensors").unlink(),
    "cut weights": cut_weights,
    "no configuration": lambda folder, _: (write_model(folder / "model") / "config.json").unlink(),
    "another run": write_other_run,
    "a file": lambda folder, _: (folder / "output").write_text("notes"),
}
"""Calls with the folder, and the training file, before a command."""

# Commands | changes of the recipe (LORA: of that with adapters) | what is prepared | parts of the message
MISTAKES = f"""
train | batch.pack_tokens_per_rank=128 | | batch.pack_tokens_per_rank: found 128 ... data.cutoff_length 256
check --ranks 3 | probe.sequence_parallel=2 | | probe.sequence_parallel: found 2 on 3 ranks
train | data.train_path=DIR/trian.jsonl | | DIR/trian.jsonl: there is no such file
train | data.validation_path=DIR/x.jsonl | | DIR/x.jsonl: there is no such
both | data.train_path=DIR/train.jsonl | no rows | DIR/train.jsonl: no row is left
both | data.train_path=DIR/train.jsonl | no JSON | DIR/train.jsonl:5: not JSON
both | data.train_path=DIR/train.jsonl | no content | DIR/train.jsonl:3: message 2 has no `content`
both | data.cutoff_length=20 | | DATA: no row is left ... prompt alone longer than the cutoff            12
both | model.path=DIR/model | small vocabulary | found token ids up to {LARGEST_ID}, expected ids below 200
both | model.path=DIR/model | no template | DIR/model has no chat template ... chat_template.jinja
train | model.path=DIR/model | no weights | model.path: DIR/model: found neither model.safetensors
both | model.path=DIR/model | cut weights | model.path: DIR/model: model.safetensors: not a complete
train | model.path=DIR/model | no configuration | model.path: DIR/model: no configuration can be read
train | model.path=DIR/model | | model.path: DIR/model: no such folder
train | LORA lora.rank=2000000000 lora.alpha=8 | | memory: found ... of host memory ... engine.memory_check=false
both | LORA methods/sft.yaml lora.target_modules=[q_proj,embed_tokens] | | lora.target_modules: found embed_tokens
both | | another run | run.output_dir: DIR/output: holds another run ... Set run.output_dir
train | | a file | run.output_dir: DIR/output: is not an empty folder
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_named_with_its_key_or_file(refuses: Refuses, tmp_path: Path, setup: TinySetup, line: str):
    line = line.replace("DIR", str(tmp_path)).replace("DATA", str(setup.train))
    command, changes, prepared, named = (part.strip() for part in line.split("|"))
    if prepared:
        PREPARE[prepared](tmp_path, setup.train)
    commands = BOTH if command == "both" else (tuple(command.split()),)
    recipe = LORA if changes.startswith("LORA") else FULL
    words = changes.removeprefix("LORA").split()
    messages = [refuses(*words, recipe=recipe, command=command) for command in commands]
    for message in messages:
        assert [text for text in named.split(" ... ") if text not in message] == [], message
    if commands == BOTH:
        assert messages[0].startswith("vcore-ds: ") and messages[1].endswith(messages[0])


@pytest.mark.parametrize(
    "overlong, verb", [("drop", "dropped: longer than 64 tokens"), ("truncate", "truncated at the cutoff")]
)
def test_some_sequences_longer_than_the_cutoff_are_counted(refuses: Refuses, tmp_path: Path, overlong: str, verb: str):
    pairs = [("q", "a" * n) for n in (10, 60, 20, 70, 80)]
    train = write_conversations(tmp_path / "train.jsonl", pairs)
    # Adapters that no machine has memory for end the run after its first lines.
    changes = [f"data.train_path={train}", f"data.overlong={overlong}", "data.cutoff_length=64"]
    changes += ["lora.rank=2000000000", "lora.alpha=8"]
    output = refuses(*changes, recipe=LORA)
    kept = "2 of 5 rows kept" if overlong == "drop" else "5 sequences"
    assert f"{train}: {kept}, " in output and f"3 {verb}" in output


def test_a_damaged_store_of_the_right_size_is_refused(refuses: Refuses, tmp_path: Path, setup: TinySetup):
    store = tmp_path / "store"
    assert main(["prepare", str(setup.train), "--tokenizer", str(setup.untied), "--output", str(store)]) == 0
    tokens = store / "tokens.bin"
    tokens.write_bytes(b"\xff\xff\xff\x7f" + tokens.read_bytes()[4:])
    for command in BOTH:
        assert f"{tokens}: damaged, " in refuses(f"data.train_path={store}", command=command)


def test_the_finished_run_of_another_recipe_is_refused(refuses: Refuses, tmp_path: Path, setup: TinySetup):
    earlier = load_recipe(FULL, setup.overrides(tmp_path / "output", "optimizer.learning_rate=0.02"))
    (tmp_path / "output" / "model").mkdir(parents=True)
    (tmp_path / "output" / "recipe.yaml").write_text(dump_recipe(earlier))
    for command in BOTH:
        message = refuses(command=command)
        assert f"run.output_dir: {tmp_path}/output: holds a run of another recipe" in message
        assert "optimizer.learning_rate: 0.02 there, 0.01 here" in message


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_model_card_that_cannot_be_made_is_noticed_at_the_start(
    setup: TinySetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
):
    """Its run was trained to the end."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delattr(model_card, "ModelCardData")
    with pytest.raises(NameError, match="ModelCardData"):
        main([command, str(FULL), *setup.overrides(tmp_path / "output", "methods/sft.yaml")])
    assert not (tmp_path / "output").exists()


# GPUs

without_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch may be able to use GPUs")


@without_cuda
@pytest.mark.parametrize("command", ["train", "reference", "fidelity", "score", "chat"])
def test_commands_refuse_gpus_that_pytorch_cannot_use(
    refuses: Refuses, setup: TinySetup, tmp_path: Path, command: str, monkeypatch, capsys, tmp_path_factory
):
    add_unused_gpu(tmp_path_factory.mktemp("machine"), monkeypatch)
    if command == "chat":
        monkeypatch.setattr("sys.stdin", io.StringIO("a question"))
        assert main([command, str(setup.untied)]) == 2
        assert capsys.readouterr().err.startswith(f"vcore-ds: {UNUSED_GPU}")
        return
    options = {
        "reference": ["--output", str(tmp_path / "reference.npz")],
        "score": ["--output", str(tmp_path / "scores")],
    }.get(command, [])
    assert UNUSED_GPU in refuses(f"data.probe_path={setup.validation}", command=(command, *options))


def run_beside_unused_gpu(arguments: Sequence[str]) -> int:
    folder, *words = arguments
    add_unused_gpu(Path(folder), pytest.MonkeyPatch())
    return main(words)


@without_cuda
def test_ranks_that_cannot_use_their_gpus_say_so_once(setup: TinySetup, tmp_path: Path):
    """Two ranks of a run, as under torchrun; and a node of preflight, in its report."""
    words = [str(FULL), *setup.overrides(tmp_path / "output")]
    with ForkedJob(run_beside_unused_gpu, [str(tmp_path), "train", *words], tmp_path / "log", num_ranks=2) as job:
        assert job.wait() == 2 and job.output.count(UNUSED_GPU) == 1, job.output
    with ForkedJob(run_beside_unused_gpu, [str(tmp_path), "preflight", *words], tmp_path / "preflight") as job:
        assert job.wait() == 2 and job.output.count(UNUSED_GPU) == 1, job.output
    assert "vcore-ds: preflight: the nodes are not ready for this run:\n" in job.output
    assert f"  {socket.gethostname()}: {UNUSED_GPU}" in job.output and "that PyTorch can use" not in job.output
