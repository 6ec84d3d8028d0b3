"""Command lines as they are typed: each trains, and leaves a complete folder that other libraries load."""

import json
import math
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from launch_scripts import deepspeed_command
from tests.helpers.commands import (
    FINITE_DIFFERENCE_METRICS,
    METRICS,
    REPOSITORY,
    command_environment,
    free_port,
    has_control_characters,
    read_metrics,
    run_command,
)
from tests.helpers.jobs import ForkedJob, forget_rank
from tests.helpers.setups import TinySetup
from vcore_ds.commands.cli import launch, main
from vcore_ds.config.load import dump_recipe, load_recipe

pytestmark = pytest.mark.e2e

RECIPE = "launch_scripts/recipes/qwen3_32b_math_full.yaml"
"""The recipe of train_32b.sh."""
HELD_OUT = re.compile(r"Held-out loss: ([\d.]+) -> ([\d.]+)")


@dataclass(frozen=True)
class Run:
    output: str
    folder: Path

    @property
    def held_out_losses(self) -> tuple[float, float]:
        before, after = HELD_OUT.search(self.output).groups()
        return float(before), float(after)

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in read_metrics(self.folder)]


def train(command: str, overrides: list[str], folder: Path) -> Run:
    done = run_command(f"{command} {' '.join(overrides)}")
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout and not has_control_characters(done.stdout), ascii(done.stdout)
    return Run(done.stdout, folder)


def fork(arguments: list[str], folder: Path) -> Run:
    """Run `vcore-ds train` without a launcher."""
    with ForkedJob(main, ["train", *arguments], folder.with_suffix(".log")) as job:
        assert job.wait() == 0, job.output
    return Run(job.output, folder)


def run_script(arguments: Sequence[str]) -> int:
    """Do what train_32b.sh does on each rank. `test_stops.py` starts the script itself under the deepspeed launcher."""
    return launch(RECIPE, arguments)


ENDS = """
import atexit, sys, threading, time, torch
from vcore_ds.commands.cli import end_process

def multiply():
    while True:
        torch.mm(matrix, matrix)

torch.set_num_threads(1)
matrix = torch.ones(1000, 1000)
threading.Thread(target=multiply, daemon=True).start()
time.sleep(0.1)
sys.stdout = open(1, "w", buffering=1 << 16, closefd=False)
atexit.register(print, "atexit")
print("result")
end_process(85)
"""


def test_a_thread_that_waits_in_torch_does_not_abort_a_process_that_ends() -> None:
    """It waits for the GIL in C++, as gloo's threads may: with `sys.exit` the process ends by SIGABRT."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (85, "result\natexit\n"), done.stderr


NOBODY = ("unshare", "--user", "--map-user=65534", "--map-group=65534")


def run_deepspeed_command(arguments: Sequence[str]) -> int:
    """Do what `launch_scripts/deepspeed_command.py` does."""
    forget_rank()
    del os.environ["LOCAL_SIZE"]  # in place of which DeepSpeed asks numactl
    sys.argv = ["deepspeed", *arguments]
    deepspeed_command.main()
    return 0


def test_the_launcher_of_the_scripts_takes_names_of_gpus(tmp_path: Path) -> None:
    """Without rights to one folder of PATH, and without numactl. The launcher of a rank without GPUs is forked."""
    (tmp_path / "rank.py").write_text("import os; os.write(1, f'{os.environ[\"CUDA_VISIBLE_DEVICES\"]}\\n'.encode())")
    (tmp_path / "locked").mkdir(mode=0)
    as_nobody = NOBODY if os.geteuid() == 0 else ()
    if as_nobody and subprocess.run([*as_nobody, "true"], capture_output=True).returncode != 0:
        pytest.skip("A PATH WITHOUT PERMISSION IS NOT TESTED HERE: root may read it, and there are no user namespaces")
    devices = {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "DS_ACCELERATOR": "cpu"}
    words = ["--quiet", "--master_port", str(free_port()), str(tmp_path / "rank.py")]
    with ForkedJob(run_deepspeed_command, words, tmp_path / "log", rank_0_serves_store=True, **devices) as job:
        assert (job.wait(), job.output.splitlines()) == (0, ["NoDevFiles"]), job.output

    environment = command_environment() | devices | {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-3"}
    environment["PATH"] = f"{tmp_path}/locked:{environment['PATH']}"
    del environment["LOCAL_SIZE"]
    script = REPOSITORY / "launch_scripts" / "deepspeed_command.py"
    done = subprocess.run(
        [*as_nobody, sys.executable, "-P", script, *words], env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["GPU-8932f937,MIG-3"] * 2), done.stderr


@pytest.fixture(scope="module")
def bash_run(setup: TinySetup, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that trains all parameters of a model with tied embeddings, with JVP utilities."""
    folder = tmp_path_factory.mktemp("runs") / "bash"
    return train("bash launch_scripts/train_32b.sh", setup.overrides(folder, model=setup.tied), folder)


def test_the_bash_script_trains_and_exports(setup: TinySetup, bash_run: Run):
    assert "step 1/2  loss " in bash_run.output and "step 2/2  loss " in bash_run.output
    world_size = check_folder(bash_run, read_recipe(bash_run))
    assert f"ZeRO-3 over {world_size} rank" in bash_run.output
    check_model(bash_run, setup, setup.tied)

    model = load_model(bash_run.folder / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with safe_open(bash_run.folder / "model" / "model.safetensors", "pt") as file:
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def fork_on_terminal(arguments: list[str], folder: Path) -> Run:
    """Run `vcore-ds train` without a launcher on a pseudo-terminal, where the progress bar is drawn."""
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (50, 200))  # a new one has size 0, and a progress bar on it would be empty
    written = b""
    with ForkedJob(main, ["train", *arguments], Path(os.ttyname(writer))) as job:
        rank = job.rank(0)
        while (is_readable := bool(select.select([reader], [], [], 0.2)[0])) or rank.is_running():
            written += os.read(reader, 1 << 16) if is_readable else b""
        code, output = job.wait(), written.decode()
    os.close(reader)
    os.close(writer)
    assert code == 0 and "Traceback" not in output, output
    return Run(output, folder)


def test_vcore_ds_train_on_a_terminal_repeats_a_run_from_its_recipe(bash_run: Run, tmp_path: Path):
    folder = tmp_path / "again"
    recipe_file = bash_run.folder / "recipe.yaml"
    again = fork_on_terminal([str(recipe_file), f"run.output_dir={folder}"], folder)

    bars = [line for line in re.split(r"[\r\n]+", again.output) if "2/2" in line and "step" in line]
    assert bars and "\r" in again.output and "loss" in bars[-1]
    assert "step 1/2  loss" not in again.output  # the bar stands in for the plain lines

    expected = read_recipe(bash_run).model_dump() | {"run": read_recipe(again).run.model_dump()}
    assert read_recipe(again).model_dump() == expected
    if check_folder(again, read_recipe(again)) == read_environment(bash_run)["world_size"]:
        assert again.losses == bash_run.losses
    else:  # on a machine where `bash FILE` starts several ranks
        assert again.losses == pytest.approx(bash_run.losses, rel=1e-5)


def test_torchrun_on_two_ranks_gives_the_same_run(setup: TinySetup, bash_run: Run, tmp_path: Path):
    folder = tmp_path / "run"
    overrides = setup.overrides(folder, "batch.micro_batch_size_per_rank=2", model=setup.tied)
    run = train("torchrun --nproc_per_node 2 launch_scripts/train_32b.sh", overrides, folder)
    assert run.output.count("step 2/2  loss ") == 1  # only one rank prints
    assert check_folder(run, read_recipe(run)) == 2
    check_model(run, setup, setup.tied)
    assert run.losses == pytest.approx(bash_run.losses, rel=1e-5)


def test_the_script_on_two_ranks_with_finite_differences_and_lora(setup: TinySetup, tmp_path: Path):
    folder = tmp_path / "run"
    words = ["--recipe", "launch_scripts/recipes/qwen3_32b_math_lora.yaml"]
    words += setup.overrides(folder, "utility.estimator=finite_difference", "utility.epsilon=1e-3")
    with ForkedJob(run_script, words, tmp_path / "log", num_ranks=2, rank_0_serves_store=True) as job:
        assert job.wait() == 0, job.output
    run = Run(job.output, folder)
    assert "Traceback" not in run.output and not has_control_characters(run.output), ascii(run.output)
    assert run.output.count("step 2/2  loss ") == 1
    assert "warning: utility.epsilon" not in run.output  # in fp32 this epsilon resolves the loss
    assert check_folder(run, read_recipe(run), also=FINITE_DIFFERENCE_METRICS) == 2
    lines = read_metrics(folder)
    assert [line["epsilon"] for line in lines] == [1e-3, 1e-3]
    assert lines[0]["signal_to_noise"] > 3
    assert all(0 < line["changed_fraction"] <= 1 for line in lines)

    base = load_model(setup.untied)
    assert compute_plain_held_out_loss(base, setup) == pytest.approx(run.held_out_losses[0], abs=1e-3)
    adapted = PeftModel.from_pretrained(base, folder / "adapter")
    trained = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    assert len(trained) == 2 * 7 and all(p.abs().max() > 0 for p in trained)  # all linear layers of both decoder layers
    assert compute_plain_held_out_loss(adapted, setup) == pytest.approx(run.held_out_losses[1], abs=1e-3)
    assert run.held_out_losses[1] != run.held_out_losses[0]


def test_sft_reports_validation_losses(setup: TinySetup, tmp_path: Path):
    folder = tmp_path / "run"
    run = fork([RECIPE, *setup.overrides(folder, "methods/sft.yaml", "run.validate_every=1")], folder)
    check_folder(run, read_recipe(run), evaluated={1, 2})
    first, second = read_metrics(folder)
    assert second["validation_loss"] == pytest.approx(run.held_out_losses[1], abs=1e-4)
    assert second["validation_loss"] < first["validation_loss"] < run.held_out_losses[0]
    assert first["alpha"] == 1.0 and first["loss"] == pytest.approx(first["weighted_loss"], rel=1e-6)
    assert first["probe_loss"] is None and first["utility_mean"] is None
    check_model(run, setup, setup.untied)


def check_folder(run: Run, recipe, *, also: frozenset[str] = frozenset(), evaluated: Collection[int] = (2,)) -> int:
    """Check a run's folder except for the exported model; returns the number of ranks. `also`: additional keys of every
    line of metrics.jsonl. `evaluated`: steps with a held-out loss."""
    assert (run.folder / "recipe.yaml").read_text() == dump_recipe(recipe)
    environment = read_environment(run)
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["packages"]["deepspeed"] == version("deepspeed")
    assert environment["python"] and environment["devices"] and environment["git_commit"]

    lines = read_metrics(run.folder)
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["epoch"] for line in lines] == pytest.approx([4 / 12, 8 / 12])
    for line in lines:
        assert set(line) == METRICS | set(also) | ({"validation_loss"} if line["step"] in evaluated else set())
        assert line["sequences"] == 4 and line["supervised_tokens"] > 4
        assert all(math.isfinite(value) for value in line.values() if value is not None)
        parts = line["seconds_probe"] + line["seconds_utility"] + line["seconds_main"] + line["seconds_step"]
        assert 0 < parts <= line["seconds"]
    return environment["world_size"]


def check_model(run: Run, setup: TinySetup, base: Path) -> None:
    """Assert that base and exported model have the reported held-out losses, computed without this package."""
    before, after = run.held_out_losses
    assert after < before
    assert compute_plain_held_out_loss(load_model(base), setup) == pytest.approx(before, abs=1e-3)
    assert compute_plain_held_out_loss(load_model(run.folder / "model"), setup) == pytest.approx(after, abs=1e-3)


def load_model(folder: Path) -> PreTrainedModel:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


@torch.no_grad()
def compute_plain_held_out_loss(model: torch.nn.Module, setup: TinySetup) -> float:
    """Mean over conversations of the mean loss of the assistant's tokens, including the end of turn."""
    tokenizer = AutoTokenizer.from_pretrained(setup.untied)
    losses = []
    for line in setup.validation.read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        conversation = tokenizer.apply_chat_template(messages, tokenize=False)
        assert conversation.startswith(prompt)
        context, answer = (
            tokenizer(text, return_tensors="pt")["input_ids"] for text in (prompt, conversation[len(prompt) :].rstrip())
        )
        labels = torch.cat([torch.full_like(context, -100), answer], dim=1)
        losses.append(model(input_ids=torch.cat([context, answer], dim=1), labels=labels).loss)
    return float(torch.stack(losses).mean())


def read_recipe(run: Run):
    return load_recipe(run.folder / "recipe.yaml")


def read_environment(run: Run) -> dict:
    return json.loads((run.folder / "environment.json").read_text())
