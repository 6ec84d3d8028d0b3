"""Mistakes of a user: one message that says what to do, exit code 2, and nothing written."""

import io
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.commands import (
    REPOSITORY,
    UNUSED_GPU,
    has_control_characters,
    variables_with_unused_gpu,
)
from tests.helpers.jobs import ForkedJob
from tests.helpers.setups import TinySetup, make_tokenizer, write_conversations, write_model
from vcore_ds.commands.cli import main
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.training.model_card import METHODS

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("one_process")]

RECIPES = REPOSITORY / "launch_scripts" / "recipes"
FULL = RECIPES / "qwen3_32b_math_full.yaml"

Refuses = Callable[..., str]


@pytest.fixture
def refuses(setup: TinySetup, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> Refuses:
    """A function that runs a command with changes that it must refuse, and returns its output, the message last."""
    monkeypatch.chdir(REPOSITORY)

    def refuses(
        *changes: str, recipe: Path = FULL, model: Path | None = None, command: tuple[str, ...] = ("train",)
    ) -> str:
        files_before = sorted(tmp_path.rglob("*"))
        overrides = setup.overrides(tmp_path / "output", *changes, model=model)
        capsys.readouterr()  # discard what the preparations of the test printed
        assert main([command[0], str(recipe), *command[1:], *overrides]) == UserError.EXIT_CODE == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("vcore-ds: ") and captured.err.count("vcore-ds: ") == 1
        assert "Traceback" not in captured.err
        assert sorted(tmp_path.rglob("*")) == files_before
        return captured.out + captured.err

    return refuses


@pytest.fixture
def both_refuse(refuses: Refuses) -> Refuses:
    """A function as `refuses`, for mistakes that `check` refuses with the message of `train`."""

    def both_refuse(*changes: str, **options: Any) -> str:
        checked = refuses(*changes, command=("check",), **options)
        assert checked.startswith("vcore-ds: ")
        message = refuses(*changes, **options)
        assert message.endswith(checked)
        return message

    return both_refuse


# Recipes


def test_all_problems_of_files_and_overrides_are_one_message(refuses: Refuses, tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(FULL.read_text() + "\nwandb:\n  project: mine\nschedule:\n  warmup_ration: 0.1\n")
    line = recipe.read_text().splitlines().index("wandb:") + 1
    message = refuses(
        "global_size=8", "optimizer.name=adam", "schedule.num_epochs=1", "batch.global_size", recipe=recipe
    )
    assert f"{recipe}:{line}: wandb: found" in message and "expected a section among method, utility" in message
    assert f"{recipe}:{line + 3}: schedule.warmup_ration: found 0.1" in message
    assert 'did you mean "schedule.warmup_ratio"?' in message
    assert "override global_size=8: global_size: found 8" in message and '"batch.global_size"?' in message
    assert 'override optimizer.name=adam: optimizer.name: found "adam"; expected adamw, sgd or muon' in message
    assert "found 2 together with schedule.num_epochs 1; expected exactly one" in message
    assert 'override batch.global_size: found "batch.global_size"; expected section.key=value' in message


def test_misspelt_files_get_the_nearest_names(refuses: Refuses):
    message = refuses("methods/dtf.yaml", recipe=RECIPES / "qwen3_32b.yaml")
    assert f"methods/dtf.yaml: found no such file; expected a recipe file (YAML); tried {REPOSITORY}" in message
    assert 'did you mean "methods/dft.yaml"' in message
    assert "qwen3_32b.yaml: found no such file" in message and "qwen3_32b_math_full.yaml" in message


def test_packs_smaller_than_the_longest_sequence_are_refused(refuses: Refuses):
    message = refuses("batch.pack_tokens_per_rank=128")
    assert "batch.pack_tokens_per_rank: found 128 together with data.cutoff_length 256" in message
    assert "expected 256 or more, or data.cutoff_length 128 or less" in message


def test_check_refuses_a_sequence_parallel_size_that_does_not_divide_the_ranks(refuses: Refuses):
    message = refuses("probe.sequence_parallel=2", command=("check", "--ranks", "3"))
    assert "probe.sequence_parallel: found 2 on 3 ranks; expected auto or one of 1" in message


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
    assert job.output.count("vcore-ds: batch.sequence_parallel: found 4 on 2 ranks") == 1
    before, _, message = job.output.partition("a divisor of the 2 ranks and the 4 query heads of")
    assert message.count("\n") == 1 and message.endswith("\n"), job.output  # nothing follows it
    assert "Traceback" not in before and not has_control_characters(job.output)
    assert not (tmp_path / "output").exists()


# Data


def test_a_missing_data_file_is_named(refuses: Refuses, tmp_path: Path):
    message = refuses(f"data.train_path={tmp_path}/trian.jsonl")
    assert f"{tmp_path}/trian.jsonl: there is no such file" in message


def test_a_missing_validation_file_is_named(refuses: Refuses, tmp_path: Path):
    assert f"{tmp_path}/held_out.jsonl: there is no such" in refuses(f"data.validation_path={tmp_path}/held_out.jsonl")


def test_a_data_file_without_rows_is_refused(both_refuse: Refuses, tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("\n\n")
    message = both_refuse(f"data.train_path={tmp_path}/train.jsonl")
    assert f"{tmp_path}/train.jsonl: no row is left" in message


def test_a_line_that_is_not_json_is_named(both_refuse: Refuses, tmp_path: Path, setup: TinySetup):
    lines = setup.train.read_text().splitlines()
    lines[4] = lines[4][:-5]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    assert f"{tmp_path}/train.jsonl:5: not JSON" in both_refuse(f"data.train_path={tmp_path}/train.jsonl")


def test_a_message_without_content_is_named(both_refuse: Refuses, tmp_path: Path, setup: TinySetup):
    lines = setup.train.read_text().splitlines()
    lines[2] = '{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "text": "hi"}]}'
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    message = both_refuse(f"data.train_path={tmp_path}/train.jsonl")
    assert f"{tmp_path}/train.jsonl:3: message 2 has no `content`, found role, text" in message


def test_data_with_only_sequences_above_the_cutoff_is_refused(both_refuse: Refuses, setup: TinySetup):
    message = both_refuse("data.cutoff_length=20")
    assert f"{setup.train}: no row is left" in message
    assert "prompt alone longer than the cutoff            12" in message


@pytest.mark.parametrize(
    "overlong, verb", [("drop", "dropped: longer than 64 tokens"), ("truncate", "truncated at the cutoff")]
)
def test_some_sequences_longer_than_the_cutoff_are_counted(refuses: Refuses, tmp_path: Path, overlong: str, verb: str):
    pairs = [("q", "a" * n) for n in (10, 60, 20, 70, 80)]
    train = write_conversations(tmp_path / "train.jsonl", pairs)
    # Adapters that no machine has memory for end the run after its first lines.
    changes = [f"data.train_path={train}", f"data.overlong={overlong}", "data.cutoff_length=64"]
    changes += ["lora.rank=2000000000", "lora.alpha=8"]
    output = refuses(*changes, recipe=RECIPES / "qwen3_32b_math_lora.yaml")
    kept = "2 of 5 rows kept" if overlong == "drop" else "5 sequences"
    assert f"{train}: {kept}, " in output and f"3 {verb}" in output


def test_a_damaged_store_of_the_right_size_is_refused(both_refuse: Refuses, tmp_path: Path, setup: TinySetup):
    store = tmp_path / "store"
    assert main(["prepare", "chat", str(setup.train), "--tokenizer", str(setup.untied), "--output", str(store)]) == 0
    tokens = store / "tokens.bin"
    tokens.write_bytes(b"\xff\xff\xff\x7f" + tokens.read_bytes()[4:])
    message = both_refuse(f"data.train_path={store}")
    assert f"{tokens}: damaged, or of another store: its size is right" in message


def test_token_ids_beyond_the_vocabulary_are_refused(both_refuse: Refuses, tmp_path: Path, setup: TinySetup):
    model = tmp_path / "model"
    tokenizer = make_tokenizer()
    tiny.qwen3(vocab_size=200).save_pretrained(model)
    tokenizer.save_pretrained(model)
    message = both_refuse(model=model)
    largest = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert f"found token ids up to {largest}, expected ids below 200, the vocab_size of the model" in message


# Models


def test_a_tokenizer_without_a_chat_template_is_refused(both_refuse: Refuses, tmp_path: Path):
    model = write_model(tmp_path / "model", chat_template=None)
    message = both_refuse(model=model)
    assert f"The tokenizer of {model} has no chat template" in message and "chat_template.jinja" in message


def test_a_model_folder_without_weights_is_refused(refuses: Refuses, tmp_path: Path):
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    message = refuses(model=model)
    assert f"model.path: {model}: found a config.json but no weights (*.safetensors)" in message


def test_truncated_weights_are_refused(both_refuse: Refuses, tmp_path: Path):
    model = write_model(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    message = both_refuse(model=model)
    assert f"model.path: {model}: model.safetensors: truncated: found " in message and "download complete?" in message


def test_a_model_folder_without_configuration_is_refused(refuses: Refuses, tmp_path: Path):
    model = write_model(tmp_path / "model")
    (model / "config.json").unlink()
    assert f"model.path: {model}: no config.json there" in refuses(model=model)


def test_a_missing_model_folder_is_named(refuses: Refuses, tmp_path: Path):
    assert f"model.path: {tmp_path}/model: no such folder" in refuses(model=tmp_path / "model")


# Memory


def test_adapters_too_large_for_the_memory_are_refused(refuses: Refuses):
    message = refuses("lora.rank=2000000000", "lora.alpha=8", recipe=RECIPES / "qwen3_32b_math_lora.yaml")
    assert "memory: found " in message and "GiB of host memory for each rank; expected " in message
    assert "  moments\n" in message and "engine.memory_check=false starts anyway" in message


# The output folder


@pytest.mark.parametrize("command", ["check", "train"])
def test_adapters_that_could_not_be_written_are_refused(refuses: Refuses, command: str):
    changes = "methods/sft.yaml", "lora.target_modules=[q_proj, embed_tokens]"
    message = refuses(*changes, recipe=RECIPES / "qwen3_32b_math_lora.yaml", command=(command,))
    assert "lora.target_modules: found embed_tokens" in message and "Embedding" in message


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_result_that_could_not_be_written_is_noticed_at_the_start(
    setup: TinySetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
):
    """Such as a new method that the model card does not know: its run was trained to the end."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delitem(METHODS, "sft")
    with pytest.raises(KeyError, match="sft"):
        main([command, str(FULL), *setup.overrides(tmp_path / "output", "methods/sft.yaml")])
    assert not (tmp_path / "output").exists()


def test_the_folder_of_another_run_is_left_alone(both_refuse: Refuses, tmp_path: Path):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "recipe.yaml").write_text("method: {}\n")
    message = both_refuse()
    assert f"run.output_dir: {tmp_path}/output: holds another run" in message and "Set run.output_dir" in message
    assert (tmp_path / "output" / "recipe.yaml").read_text() == "method: {}\n"


def test_the_finished_run_of_another_recipe_is_refused(both_refuse: Refuses, tmp_path: Path, setup: TinySetup):
    earlier = load_recipe(FULL, setup.overrides(tmp_path / "output", "optimizer.learning_rate=0.02"))
    (tmp_path / "output" / "model").mkdir(parents=True)
    (tmp_path / "output" / "recipe.yaml").write_text(dump_recipe(earlier))
    message = both_refuse()
    assert f"run.output_dir: {tmp_path}/output: holds a run of another recipe" in message
    assert "optimizer.learning_rate: 0.02 there, 0.01 here" in message


def test_an_output_folder_that_is_a_file_is_left_alone(refuses: Refuses, tmp_path: Path):
    (tmp_path / "output").write_text("notes")
    assert f"run.output_dir: {tmp_path}/output: is not an empty folder" in refuses()
    assert (tmp_path / "output").read_text() == "notes"


# GPUs

without_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch may be able to use GPUs")


@without_cuda
@pytest.mark.parametrize("command", ["train", "reference", "fidelity", "score", "chat"])
def test_commands_refuse_gpus_that_pytorch_cannot_use(
    refuses: Refuses, setup: TinySetup, tmp_path: Path, command: str, monkeypatch, capsys, tmp_path_factory
):
    for name, value in variables_with_unused_gpu(tmp_path_factory.mktemp("machine")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DS_ACCELERATOR")
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


@without_cuda
def test_ranks_that_cannot_use_their_gpus_say_so_once(setup: TinySetup, tmp_path: Path):
    """Two ranks of a run, as under torchrun; and a node of preflight, in its report."""
    words = [str(FULL), *setup.overrides(tmp_path / "output")]
    variables = variables_with_unused_gpu(tmp_path)
    with ForkedJob(main, ["train", *words], tmp_path / "log", num_ranks=2, **variables) as job:
        assert job.wait() == 2 and job.output.count(UNUSED_GPU) == 1, job.output
    with ForkedJob(main, ["preflight", *words], tmp_path / "preflight", **variables) as job:
        assert job.wait() == 2 and job.output.count(UNUSED_GPU) == 1, job.output
    assert "vcore-ds: preflight: the nodes are not ready for this run:\n" in job.output
    assert f"  {socket.gethostname()}: {UNUSED_GPU}" in job.output and "that PyTorch can use" not in job.output
