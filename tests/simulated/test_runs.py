"""Complete runs on the simulated device, from a Hugging Face folder to an export: the same losses as on the CPU."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.gpu.node import steps as node_steps
from tests.helpers import resumed_runs, tiny
from tests.helpers.collectives import find_timeout_minutes
from tests.helpers.moe_models import moe_model
from tests.helpers.parity import Case, run_case
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import sums, write_conversations, write_deepspeed_config
from tests.helpers.simulated_cuda import host_waits
from tests.helpers.simulated_cuda.ranks import run_launches
from tests.helpers.soak import soak
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.export.write import export_run
from vcore_ds.commands.fidelity.measure import measure_fidelity
from vcore_ds.config.schema import Recipe
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import cpu_group
from vcore_ds.training.checkpoints import start_write

pytestmark = pytest.mark.dist

NUM_STEPS = 2
STOP = 1
"""The next step takes the saved direction."""
FP32, BF16 = 1e-4, 3e-2
"""Relative tolerances. Reductions of two ranks, and Adam's division by small gradients, round in another order."""
EXPORTED = ("exported", "exported on the CPU")
COMPARED = ("loss", "alpha", "grad_norm", "direction_norm", "validation_loss")

LORA = {"lora": {"rank": 4, "alpha": 8.0}}
SFT = {"method": {"name": "sft"}}
MOE_MODEL = {"model": {"path": "moe_model"}}
SINKS, SOFTCAP = ({"model": {"path": name}} for name in ("gpt_oss", "gemma2"))
MEGATRON = {"model": {"provider": "megatron"}}
ON_CPU: dict[str, dict[str, Any]] = {
    "full": {},
    "sft": SFT,
    "adapters": LORA,
    "experts": MOE_MODEL,
    "sinks": SINKS,
    "softcap": SOFTCAP,
}

ALONE: dict[str, dict[str, Any]] = {
    "full": {},
    "sft, bf16": {**SFT, "model": {"precision": "bf16"}},
    "full, packed, activations offloaded": {
        "batch": {"global_size": 4, "pack_tokens_per_rank": 128},
        "model": {"gradient_checkpointing": True, "activation_offload": True},
    },
    "full, all offloaded": {"engine": {"deepspeed_config": "offload_all.json"}},
    "adapters": LORA,
    "sinks": SINKS,
    "softcap": SOFTCAP,
} | soak(
    {
        "full, optimizer offloaded": {"engine": {"deepspeed_config": "offload_optimizer.json"}},
        "full, megatron": MEGATRON,
        "experts": MOE_MODEL,
    }
)
TOGETHER: dict[str, dict[str, Any]] = {
    "full, sequences on two ranks": {"batch": {"global_size": 4, "sequence_parallel": 2}},
    "full, layers on two ranks": {**MEGATRON, "parallel": {"tensor": 2}},
    "experts, divided between two ranks": {**MOE_MODEL, "parallel": {"expert": 2}},
} | soak({"experts, two ranks": MOE_MODEL})
"""The part of a name before the comma is the run on the CPU to compare with: the use of ranks and memory changes no
loss."""

DIVIDED = {
    precision: Case(
        expert=2, moe_kind="qwen3_moe", checkpointing=True, num_main=4, num_probe=2,
        max_steps=1, sections={"model": {"path": "none", "precision": precision}},
    )
    for precision in ("fp32", "bf16")
}  # fmt: skip
"""Steps with half of the experts on each of two ranks, by precision; the grouped GEMM has a kernel in bf16."""

STEPS_OF_A_NODE = ("Ulysses 2", "zero3_bf16_hierarchical", "zero3_bf16_offload_optimizer")
"""Steps of `make gpu8` whose features no other test here has."""

CAPPED = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    sliding_window=16,
)  # fmt: skip
"""Sizes of a Gemma 2 model, which caps scores and logits."""

DEEPSPEED_CONFIGS: dict[str, tuple[str, ...]] = {
    "fp32.json": (),
    "bf16.json": (),
    "offload_optimizer.json": ("offload_optimizer",),
    "offload_all.json": ("offload_optimizer", "offload_param"),
}
"""Files, with the sections of the states that each keeps in host memory."""


def make_recipe(folder: Path, name: str, sections: dict[str, Any]) -> Recipe:
    model = {"path": "dense", "precision": "fp32", **sections.get("model", {})}
    engine = {"deepspeed_config": f"{model['precision']}.json", **sections.get("engine", {})}
    return Recipe(**{
        "method": {"kl_budget": 0.05},
        "data": {
            "train_path": str(folder / "train.jsonl"),
            "validation_path": str(folder / "validation.jsonl"),
            "cache_dir": str(folder / "cache"),
            "cutoff_length": 128,
        },
        "batch": {"global_size": 4},
        "probe": {"batch_size": 2, "every": 2},
        "optimizer": {"learning_rate": 1e-3, "eps": 1e-4},
        "schedule": {"num_steps": NUM_STEPS},
        "run": {"output_dir": str(folder / "runs" / name), "validate_every": 2, "num_followed_traces": 0},
        **sections,
        "model": {**model, "path": str(folder / model["path"])},
        "engine": {**engine, "deepspeed_config": str(folder / engine["deepspeed_config"])},
    })  # fmt: skip


def read_compared_metrics(run: Path) -> list[list[float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in COMPARED if line.get(name) is not None] for line in lines]


def train(folder: Path, where: str, runs: dict[str, dict[str, Any]]) -> dict[str, list[list[float]]]:
    return {
        name: read_compared_metrics(resumed_runs.run_to_end(make_recipe(folder, f"{where} {name}", sections)))
        for name, sections in runs.items()
    }


def train_alone(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = train(folder, "simulated", ALONE)
    stopped = make_recipe(folder, "stopped", {})
    resumed_runs.run_until(stopped, STOP)
    results["full, resumed"] = read_compared_metrics(resumed_runs.run_to_end(stopped))
    export_run(folder / "runs" / "simulated full", output=folder / "exported")
    results["fidelity"] = (
        measure_fidelity(make_recipe(folder, "fidelity", {}), num_sequences=2, epsilons=[]).estimators[0].spearman
    )
    return results


def train_together(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = train(folder, "simulated", TOGETHER)
    for precision, case in DIVIDED.items():
        with host_waits.counted() as waits:
            results[f"steps in {precision}"] = run_case(case)
        results[f"waits in {precision}"] = {place: n for place, n in waits.items() if "models/expert" in place}
    results["steps of a node"] = node_steps.measure(STEPS_OF_A_NODE)
    results["devices of writers"] = layout.gather_objects("job", start_write(torch.cuda.current_device).result())
    results["launch order"] = os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"]
    results["minutes of the group of host memory"] = find_timeout_minutes(cpu_group())
    return results


def write_inputs(folder: Path) -> Path:
    tokenizer = make_tokenizer()
    vocabulary = len(tokenizer) + len(tokenizer) % 2  # even, so that two ranks can divide it
    tiny.qwen3(vocab_size=vocabulary).save_pretrained(folder / "dense")
    tiny.moe_model(vocab_size=vocabulary).save_pretrained(folder / "moe_model")
    moe_model("gpt_oss", vocab_size=vocabulary).save_pretrained(folder / "gpt_oss")
    torch.manual_seed(0)
    capped = AutoConfig.for_model("gemma2", vocab_size=vocabulary, **CAPPED)
    AutoModelForCausalLM.from_config(capped).save_pretrained(folder / "gemma2")
    for name in ("dense", "moe_model", "gpt_oss", "gemma2"):
        tokenizer.save_pretrained(folder / name)
    write_conversations(folder / "train.jsonl", sums(range(13)))
    write_conversations(folder / "validation.jsonl", sums(range(20, 23)))
    for name, offloaded in DEEPSPEED_CONFIGS.items():
        write_deepspeed_config(folder / name, bf16="bf16" in name, offloaded=offloaded, pin_memory=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("simulated"))


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> dict[str, list[list[float]]]:
    return run_ranks(train, 1, folder, "cpu", ON_CPU)[0]


@pytest.fixture(scope="module")
def launches(library: Path, folder: Path) -> list[dict[str, Any]]:
    """Results on one rank, and those of the first of two ranks."""
    return [
        results[0] for results in run_launches(library, [(train_alone, 1, (folder,)), (train_together, 2, (folder,))])
    ]


@pytest.fixture(scope="module")
def alone(launches: list[dict[str, Any]]) -> dict[str, Any]:
    return launches[0]


@pytest.fixture(scope="module")
def together(launches: list[dict[str, Any]]) -> dict[str, Any]:
    return launches[1]


def assert_like_on_cpu(metrics: list[list[float]], name: str, on_cpu: dict[str, list[list[float]]]) -> None:
    expected = on_cpu[name.partition(",")[0]]
    assert len(metrics) == len(expected) == NUM_STEPS
    for step, step_on_cpu in zip(metrics, expected, strict=True):
        assert step == pytest.approx(step_on_cpu, rel=BF16 if "bf16" in name else FP32)


@pytest.mark.parametrize("name", [*ALONE, "full, resumed"])
def test_a_run_has_the_metrics_of_the_cpu(alone: dict[str, Any], on_cpu, name: str) -> None:
    assert_like_on_cpu(alone[name], name, on_cpu)


@pytest.mark.parametrize("name", TOGETHER)
def test_a_run_on_two_ranks_has_the_metrics_of_one_on_the_cpu(together: dict[str, Any], on_cpu, name: str) -> None:
    assert_like_on_cpu(together[name], name, on_cpu)


@pytest.mark.parametrize("precision", DIVIDED)
def test_a_step_with_divided_experts_equals_the_oracles(together: dict[str, Any], precision: str) -> None:
    deviations = together[f"steps in {precision}"]
    print(deviations)
    for quantity in ("utilities", "weights", "alpha", "gradient", "loss"):
        assert deviations[quantity] < (0.06 if precision == "bf16" else 1e-5), quantity


def test_each_writer_works_on_the_gpu_of_its_rank(together: dict[str, Any]) -> None:
    assert together["devices of writers"] == [0, 1]


def test_nccls_order_and_the_recipes_timeout_hold_for_all_groups(together: dict[str, Any]) -> None:
    assert together["launch order"] == "1"
    assert together["minutes of the group of host memory"] == 10.0  # as `run_ranks` says


def test_steps_of_a_node_equal_the_oracles(together: dict[str, Any]) -> None:
    rows = together["steps of a node"]
    assert [row["case"] for row in rows] == list(STEPS_OF_A_NODE)
    for row in rows:
        assert row["result"] == "passed", row
        # Its bound is that of a GPU; the simulated one sums as the CPU does.
        assert all(row[quantity] < 1e-5 for quantity in node_steps.QUANTITIES[:-1]), row


def test_a_layer_with_divided_experts_synchronises_once(together: dict[str, Any]) -> None:
    """The host waits for the experts' numbers of tokens in each forward of the one layer with experts: that of the
    probe and the recomputations in both backwards; the one in the fused pass is counted at another place."""
    assert together["waits in bf16"] == {
        "models/experts.py run_at_experts: copy to the host": 3,
        "models/experts.py measure_expert_load: copy to the host": 1,
    }


def test_an_exported_run_has_the_weights_of_the_cpu(alone: dict[str, Any], on_cpu, folder: Path) -> None:
    export_run(folder / "runs" / "cpu full", output=folder / "exported on the CPU")
    weights, expected = (load_file(folder / name / "model.safetensors") for name in EXPORTED)
    for name in weights.keys() | expected.keys():
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-5)


def test_utilities_agree_with_the_exact_ones(alone: dict[str, Any]) -> None:
    assert alone["fidelity"] > 0.999
