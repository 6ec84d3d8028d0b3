"""Cases of steps and whole runs, measured on the device of this process; `tests.gpu.cases` compares devices."""

import copy
from pathlib import Path
from typing import Any

from tests.helpers import resumed_runs, tiny
from tests.helpers.setups import sums, write_conversations
from tests.helpers.step_cases import steps
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.config.load import SHIPPED_DEEPSPEED_CONFIGS
from vcore_ds.config.schema import Recipe
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.distributed.process_group import start_process_group

STEP_NUMBERS = ("loss", "weighted_loss", "alpha", "grad_norm", "utility_std")
RUN_NUMBERS = ("loss", "grad_norm")
NUM_STEPS = 6
STOP = 4
"""Run folders are copied after this step, as a kill would leave them, and resumed."""

VCORE = {"name": "vcore", "kl_budget": 0.05}
RUNS: dict[str, dict[str, Any]] = {
    "vcore, bf16": {},
    "vcore, fp32": {"model": {"precision": "fp32"}},
    "vcore, LoRA": {"lora": {"rank": 4, "alpha": 8.0, "dropout": 0.05}},
    "vcore over the batch": {"method": VCORE | {"scope": "sequence_and_batch", "batch_kl_budget": 0.5}},
    "sft, packed, activations in host memory": {
        "method": {"name": "sft"},
        "model": {"gradient_checkpointing": True, "activation_offload": True},
        "batch": {"pack_tokens_per_rank": 256},
    },
    "vcore, optimizer in host memory": {"engine": {"deepspeed_config": "zero3_bf16_offload_optimizer.json"}},
    "vcore, all in host memory": {"engine": {"deepspeed_config": "zero3_bf16_offload_all.json"}},
    "vcore, finite differences": {"utility": {"estimator": "finite_difference", "epsilon": "auto"}},
    "vcore, parallel layers": {"model": {"provider": "megatron"}},
    "vcore, MoE": {"model": {"path": "moe_model"}},
}
"""Run -> sections of its recipe, merged over those of `make_recipe`."""


def make_recipe(folder: Path, name: str, *, num_steps: int = NUM_STEPS) -> Recipe:
    sections: dict[str, Any] = {
        "method": VCORE,
        "probe": {"batch_size": 2},
        "lora": None,
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"num_steps": num_steps},
        **copy.deepcopy(RUNS[name]),
    }
    model = {"path": "model", "precision": "bf16", **sections.get("model", {})}
    config = sections.get("engine", {}).get("deepspeed_config", f"zero3_{model['precision']}.json")
    return Recipe(
        **{
            **sections,
            "model": {**model, "path": str(folder / model["path"])},
            "data": {
                "train_path": str(folder / "train.jsonl"),
                "cache_dir": str(folder / "cache"),
                "cutoff_length": 256,
            },
            "batch": {"global_size": 4, **sections.get("batch", {})},
            "engine": {"deepspeed_config": str(SHIPPED_DEEPSPEED_CONFIGS / config)},
            "run": {"output_dir": str(folder / name.replace(", ", "_").replace(" ", "_")), "num_followed_traces": 0},
        }
    )


def write_inputs(folder: Path, num_traces: int = 12) -> None:
    """Write two-layer models, with sizes that the kernels of GPUs support, and conversations."""
    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = dict(vocab_size=len(tokenizer), hidden_size=64, head_dim=64)
    for name, model in (("model", tiny.qwen3(**sizes)), ("moe_model", tiny.moe_model(**sizes))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_conversations(folder / "train.jsonl", sums(range(num_traces)))


def measure_step_case(case: str, folder: Path) -> dict[str, Any]:
    """Numbers of three steps of a case; nothing is written to `folder`."""
    start_process_group(timeout_minutes=10)
    with steps(case, num_layers=2, overlap=uses_gpu()) as run:
        lines = [run.take().values for _ in range(3)]
    names = [name for name in STEP_NUMBERS if lines[0].get(name) is not None]
    return {"straight": [{name: line[name] for name in names} for line in lines]}


def measure_run(name: str, folder: Path) -> dict[str, Any]:
    """Numbers of a run's steps, and of the same run killed and resumed."""
    write_inputs(folder)
    recipe = make_recipe(folder, name)
    killed = Path(recipe.run.output_dir).with_suffix(".killed")
    straight = read_numbers(resumed_runs.run_and_copy_after(recipe, STOP, killed))
    run = recipe.run.model_copy(update={"output_dir": str(killed)})
    resumed = resumed_runs.run_to_end(recipe.model_copy(update={"run": run}))
    return {"straight": straight, "resumed": read_numbers(resumed)}


def read_numbers(folder: Path) -> list[dict[str, float]]:
    return [{name: line[name] for name in RUN_NUMBERS} for line in resumed_runs.read_deterministic_metrics(folder)]
