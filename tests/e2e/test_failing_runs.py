"""Runs that start and fail: utilities that are noise, losses and gradients that are not finite."""

import json
import math
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from tests.helpers import step_runs, tiny
from tests.helpers.commands import FINITE_DIFFERENCE_METRICS, read_metrics
from tests.helpers.jobs import ForkedJob
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import TinySetup, sums, write_conversations, write_model
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.cli import main
from vcore_ds.common.errors import UserError, is_out_of_memory
from vcore_ds.common.random_streams import Stream
from vcore_ds.config.load import load_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import Batch, StepBatches
from vcore_ds.data.dataset import MainOrder, RandomDraws
from vcore_ds.distributed import layout
from vcore_ds.engine.zero3 import Engine, NonFiniteGradient, NonFiniteLoss
from vcore_ds.training.faults import describe_fault, find_largest_value, find_non_finite_sequences
from vcore_ds.training.run import train
from vcore_ds.utility.estimators import Estimator

pytestmark = pytest.mark.e2e

RECIPE = "launch_scripts/recipes/qwen3_32b_math_full.yaml"


def test_finite_difference_below_the_resolution_of_bf16_warns(setup: TinySetup, tmp_path: Path):
    changes = ["utility.estimator=finite_difference", "utility.epsilon=1e-5"]
    overrides = setup.overrides(tmp_path / "output", *changes, precision="bf16")
    with ForkedJob(main, ["train", RECIPE, *overrides], tmp_path / "log") as job:
        assert job.wait() == 0, job.output
    assert job.output.count("warning: utility.epsilon 1e-05 does not resolve the loss: ") == 1
    assert "Use utility.estimator=jvp" in job.output
    changed = float(re.search(r"changed ([\d.]+)% of the trainable parameters", job.output)[1])
    ratio = float(re.search(r"made is ([\d.]+) times its error", job.output)[1])
    first, second = read_metrics(tmp_path / "output")
    assert first.keys() >= FINITE_DIFFERENCE_METRICS and first["epsilon"] == 1e-5
    assert changed == pytest.approx(100 * first["changed_fraction"], abs=0.06) and changed < 5
    assert ratio == pytest.approx(first["signal_to_noise"], abs=0.006) and ratio < 3
    assert second["signal_to_noise"] is None  # measured once
    assert (tmp_path / "output" / "model" / "model.safetensors").is_file()


def test_non_finite_loss_ends_the_run(setup: TinySetup, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The embedding of a character that only one sequence contains is NaN; the sequence comes in the second step."""
    main_order, probe_stream = MainOrder([12], 4, 42), RandomDraws([12], 2, 42, Stream.PROBE)
    probed = {i for k in range(2) for i in probe_stream.step(k)}
    bad = next(i for i in main_order.step(1) if i not in probed)
    pairs = sums(range(12))
    pairs[bad] = (pairs[bad][0] + " Z", pairs[bad][1])
    train = write_conversations(tmp_path / "train.jsonl", pairs)
    model = write_model_with_nan(tmp_path / "model", "Z")

    overrides = setup.overrides(tmp_path / "output", f"data.train_path={train}", model=model)
    with ForkedJob(main, ["train", RECIPE, *overrides], tmp_path / "log", num_ranks=2) as job:
        assert job.wait() == 1, job.output
    (rank,) = set(re.findall(rf"step 2: the loss is not finite; rank (\d): sequence ids \[{bad}\]\.", job.output))
    assert rank in "01" and "The parameters were not updated." in job.output
    assert job.output.count("warning: model.embed_tokens.weight: not all loaded values are finite") == 1
    assert (
        job.output.count("model.embed_tokens.weight is not finite; the last update") == 1
        and "row" not in job.output.partition("the loss is not finite")[2]
    )
    assert job.output.count("the loss is not finite") == 1 and job.output.count("vcore-ds: ") == 1
    assert "Traceback" not in job.output
    assert [line["step"] for line in read_metrics(tmp_path / "output")] == [1]
    assert not (tmp_path / "output" / "model").exists()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "output"), "--text"]) == 0
    before_tokens, _, _ = capsys.readouterr().out.partition("Tokens that gained")
    assert before_tokens.count("the last attempt ended in step 2: step 2: the loss is not finite") == 1


EXHAUSTING = """
import os

import torch


def exhaust(losses):
    if os.environ["RANK"] == "1" and len(losses) != 6:  # not when it is tried at the start
        torch.empty(2**60, dtype=torch.uint8)
    return torch.ones_like(losses)
"""


def test_a_rank_that_is_out_of_memory_names_what_needs_less(setup: TinySetup, tmp_path: Path):
    (tmp_path / "exhaust.py").write_text(EXHAUSTING)
    changes = ["methods/custom.yaml", f"method.function={tmp_path}/exhaust.py:exhaust", "method.options={}"]
    changes += ["batch.pack_tokens_per_rank=2048", "data.cutoff_length=256", "model.gradient_checkpointing=false"]
    overrides = setup.overrides(tmp_path / "output", *changes)
    with ForkedJob(main, ["train", RECIPE, *overrides], tmp_path / "log", num_ranks=2) as job:
        assert job.wait() == 1, job.output
    assert re.search(r"\nvcore-ds: rank 1 .*: step 1, main: out of memory: .*can't allocate memory", job.output)
    advice = job.output.partition("These need less memory:")[2]
    assert "model.gradient_checkpointing=true: " in advice and "batch.pack_tokens_per_rank=1024: " in advice
    assert "4 ranks: " in advice and "Traceback" not in job.output, job.output
    assert job.output.count("These need less memory:") == 1
    end = json.loads((tmp_path / "output" / "end.json").read_text())
    assert end["step"] == 1 and end["message"].startswith("rank 1: out of memory: ")
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and not is_out_of_memory(RuntimeError("x"))


@pytest.mark.parametrize("rate, code", [(300.0, 0), (1e30, 1)])
def test_a_learning_rate_that_destroys_the_model_is_named(setup: TinySetup, tmp_path: Path, rate: float, code: int):
    changes = ["methods/sft.yaml", "schedule.num_steps=3", "schedule.kind=constant", "schedule.warmup_ratio=0"]
    overrides = setup.overrides(tmp_path / "output", *changes, f"optimizer.learning_rate={rate}")
    with ForkedJob(main, ["train", RECIPE, *overrides], tmp_path / "log") as job:
        assert job.wait() == code, job.output
    losses = [line["loss"] for line in read_metrics(tmp_path / "output")]
    diverges = [i for i, loss in enumerate(losses, start=1) if loss > max(2 * losses[0], losses[0] + 1)]
    warned = re.findall(r"warning: step (\d): .*diverged: the loss .*optimizer.learning_rate", job.output)
    assert warned == [str(step) for step in diverges[:1]]
    if code == 0:
        assert diverges
    else:
        assert re.search(r"the loss is not finite.*learning rate 1e\+30 and the gradient norm [\d.]+", job.output)
        assert "row" not in job.output.partition("the loss is not finite")[2]  # all rows


def run_on_port(arguments: Sequence[str]) -> int:
    os.environ["MASTER_PORT"], *command = arguments
    return main(command)


@pytest.mark.parametrize("command", ["train", "preflight"])
def test_a_port_of_another_job_is_one_message(setup: TinySetup, tmp_path: Path, command: str):
    with socket.create_server(("", 0)) as other_job:
        port = str(other_job.getsockname()[1])
        words = [port, command, RECIPE, *setup.overrides(tmp_path / "output")]
        with ForkedJob(run_on_port, words, tmp_path / "log", num_ranks=2, rank_0_serves_store=True) as job:
            assert job.wait() == 2, job.output
    assert job.output.startswith(f"vcore-ds: MASTER_PORT: found {port}") and "--master_port" in job.output
    assert "Traceback" not in job.output and not (tmp_path / "output").exists()


def write_model_with_nan(folder: Path, character: str) -> Path:
    write_model(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][make_tokenizer().convert_tokens_to_ids(character)] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Failures = tuple[dict[str, tuple[str, bool]], str]
"""Results of `take_non_finite_steps` and `run_model_with_leaky_packing` on one rank."""


@pytest.fixture(scope="module")
def failures(setup: TinySetup, tmp_path_factory: pytest.TempPathFactory) -> list[Failures]:
    return run_ranks(fail, 2, setup, tmp_path_factory.mktemp("failing"))


def fail(setup: TinySetup, folder: Path) -> Failures:
    return take_non_finite_steps(), run_model_with_leaky_packing(setup, folder)


def test_attention_across_packed_sequences_ends_the_run_before_its_first_step(failures: list[Failures]):
    for _, message in failures:
        assert message.startswith("model.path: gpt_oss: another sequence in one pack changes a sequence's losses")
        assert "Set batch.pack_tokens_per_rank to null" in message and "nats in the mean, expected at most" in message


def run_model_with_leaky_packing(setup: TinySetup, folder: Path) -> str:
    """Message with which a run of gpt-oss ends under eager attention, whose mask does not separate packed sequences.
    Nothing is written. Must be the last engine of its process, as it is not closed."""
    if layout.is_first():
        tokenizer = make_tokenizer()
        config = make_tiny_gpt_oss_config(len(tokenizer))
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    torch.distributed.barrier()
    changes = ["model.attention=eager", "methods/sft.yaml", "batch.pack_tokens_per_rank=256"]
    try:
        train(load_recipe(RECIPE, setup.overrides(folder / "output", *changes, model=folder / "model")))
    except UserError as error:
        assert not (folder / "output").exists()
        return str(error)
    return "no error"


def make_tiny_gpt_oss_config(vocabulary: int) -> GptOssConfig:
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    return GptOssConfig(**sizes, **experts, num_key_value_heads=2, vocab_size=vocabulary, pad_token_id=0)


def test_non_finite_losses_and_gradients_leave_the_parameters_alone(failures: list[Failures]):
    for steps, _ in failures:
        for case, (message, as_expected) in steps.items():
            assert as_expected, case
            if case != "good data afterwards":
                expected = MESSAGES[case] + r"\. The parameters were not updated\."
                assert re.fullmatch(expected, message), (case, message)


BAD_TOKEN = tiny.VOCABULARY - 1
ALL = r"rank 0: sequence ids \[0, 2\]; rank 1: sequence ids \[1, 3\]"
MESSAGES = {
    "loss": r"the loss is not finite; rank 1: sequence ids \[3\]",
    "losses on both ranks": r"the loss is not finite; rank 0: sequence ids \[2\]; rank 1: sequence ids \[1, 3\]",
    "probe": rf"the loss of the probe batch is not finite; it is summed over {ALL}",
    "gradient": rf"the gradient is not finite; it is summed over {ALL}",
    "probe gradient": rf"the gradient of the probe batch is not finite; it is summed over {ALL}",
}


def take_non_finite_steps() -> dict[str, tuple[str, bool]]:
    """The message of each case on this rank, and whether the step left parameters and optimizer state untouched; for
    the good data afterwards, whether the same engine continues to learn."""
    vcore, sft = step_runs.make_recipe(), step_runs.make_recipe(method={"name": "sft"})
    outcomes = {}

    model = tiny.token_loss_model()
    with torch.no_grad():
        model.causal_lm.model.embed_tokens.weight[BAD_TOKEN] = float("nan")
    engine = step_runs.make_engine(model, vcore)
    estimator = step_runs.make_estimator(vcore, engine)
    good = step_runs.deal(make_batch_with_bad_token([]), 1)
    # Adam has moments by now.
    step_runs.train_step(engine, vcore, StepBatches(good, good), estimator, learning_rate=1e-3)
    cases = {
        "loss": StepBatches(step_runs.deal(make_batch_with_bad_token([3]), 1), good),
        "losses on both ranks": StepBatches(step_runs.deal(make_batch_with_bad_token([1, 2, 3]), 2), good),
        "probe": StepBatches(good, step_runs.deal(make_batch_with_bad_token([3]), 1)),
    }
    assert [find_non_finite_sequences(engine, batches.main) for batches in cases.values()] == [[3], [1, 2, 3], []]
    assert find_non_finite_sequences(engine, cases["probe"].probe) == [3]
    name, value = find_largest_value(engine)
    assert name == "model.embed_tokens.weight" and math.isnan(value)
    for case, batches in cases.items():
        outcomes[case] = try_step(engine, vcore, batches, estimator)
    before = state_bytes(engine)
    metrics = step_runs.train_step(engine, vcore, StepBatches(good, good), estimator, learning_rate=1e-3)
    moved = state_bytes(engine) != before
    outcomes["good data afterwards"] = ("", moved and math.isfinite(metrics.values["grad_norm"]))
    engine.close()

    model = tiny.token_loss_model()
    with torch.no_grad():
        # Losses of 1e36 fit into fp32; their gradients, divided by the size of the embeddings, do not.
        model.causal_lm.lm_head.weight.mul_(1e37)
        model.causal_lm.model.embed_tokens.weight.mul_(0.01)
    engine = step_runs.make_engine(model, sft)
    batches = step_runs.deal(tiny.make_batch(4), 1)
    outcomes["gradient"] = try_step(engine, sft, StepBatches(batches, []), step_runs.make_estimator(sft, engine))
    probing = step_runs.make_estimator(vcore, engine)
    outcomes["probe gradient"] = try_step(engine, vcore, StepBatches(batches, batches), probing)
    engine.close()
    return outcomes


def try_step(engine: Engine, recipe: Recipe, batches: StepBatches, estimator: Estimator) -> tuple[str, bool]:
    before = state_bytes(engine)
    try:
        step_runs.train_step(engine, recipe, batches, estimator, learning_rate=1e-3)
    except (NonFiniteLoss, NonFiniteGradient) as error:
        return describe_fault(error, batches), state_bytes(engine) == before
    return "no error", False


def state_bytes(engine: Engine) -> bytes:
    """This rank's shards of parameters, master weights and optimizer state."""
    tensors = [parameter.ds_tensor for parameter in engine.module.parameters()]
    tensors += engine.shards.masters()
    for state in engine.optimizer.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)


def make_batch_with_bad_token(rows: list[int]) -> Batch:
    """Four sequences; those of `rows` have the token in their prompt."""
    batch = tiny.make_batch(4)
    batch.input_ids[batch.input_ids == BAD_TOKEN] = 0
    batch.labels[batch.labels == BAD_TOKEN] = 0
    batch.input_ids[rows, 1] = BAD_TOKEN
    return batch
