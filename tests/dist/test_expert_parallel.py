"""Steps with the experts of each layer divided among ranks, against one process; and their checkpoints and results,
which do not depend on the expert-parallel size."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.helpers import resumed_runs, step_runs, tiny
from tests.helpers.moe_models import write_moe_model
from tests.helpers.parity import Case, assert_parity, run_case
from tests.helpers.ranks import run_ranks
from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import StepBatches
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.engine.checkpoint_shards import read_state, state_tensors, write_state
from vcore_ds.engine.export_shards import save_hugging_face
from vcore_ds.engine.sharded_loading import load_sharded, partition_experts
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models import experts
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.dual_tensors import make_dual
from vcore_ds.models.experts import OUR_EXPERTS, mark_sharded, uses_our_experts
from vcore_ds.utility.estimators import Estimator
from vcore_ds.utility.fused_forward import UnrecordedTangents

pytestmark = pytest.mark.dist

SEPARATE = {"utility": {"fused": False}}
CLIPPED = {
    "probe": {"direction": "adam", "clip": 1.0},
    "optimizer": {"learning_rate": step_runs.LEARNING_RATE, "gradient_clipping": 0.1},
}
MUON = {
    "probe": {"direction": "muon"},
    "optimizer": {"name": "muon", "learning_rate": step_runs.LEARNING_RATE, "weight_decay": 0.1},
}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
QWEN, DEEPSEEK = "qwen3_moe", "deepseek_v3"
CASES = {
    "2 of 4, shared experts, checkpointed": Case(expert=2, moe_kind=DEEPSEEK, checkpointing=True),
    "2 of 4, offloaded, clipped, checkpointed, separate passes": Case(
        expert=2, moe_kind=DEEPSEEK, checkpointing=True, sections=SEPARATE | CLIPPED, config=OFFLOADED
    ),
    "2 of 4, lora outside experts, idle micro-batches": Case(
        expert=2, moe_kind=DEEPSEEK, lora=True, num_main=5, num_probe=1
    ),
    "2 of 4, sequence parallel, packed": Case(expert=2, moe_kind=DEEPSEEK, sequence_parallel=(2, 4), packed=True),
    "2 of 4, muon, persistent parameters": Case(expert=2, moe_kind=QWEN, persistence_threshold=100_000, sections=MUON),
    "all 4, idle experts, checkpointed, idle micro-batches, one reduction, clipped": Case(
        expert=4,
        moe_kind=f"{QWEN}, idle experts",
        checkpointing=True,
        num_main=5,
        num_probe=1,
        coalesce=True,
        sections=CLIPPED,
    ),
}


def run_all(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {name: run_case(case) for name, case in CASES.items()}
    train_and_write(folder)
    for size in (1, 4):
        read_and_write(folder, size)
    results |= {"refused": collect_refusals(), "layer": compare_layer()}
    return results | {"other experts": reroute_recomputed_layer()}  # last: it ends within a backward


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    write_moe_model(folder / "model", DEEPSEEK)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run_all, 4, folder)


@pytest.mark.parametrize("name", CASES)
def test_step_with_divided_experts_equals_reference(results, name):
    assert_parity([result[name] for result in results])


def compare_layer() -> dict[str, float]:
    """Errors of a layer whose ranks differ as much as they can: tokens and their tangents on two of four ranks, and one
    rank that nobody sends tokens to."""
    start_process_group(10, expert=2)
    sizes = dict(hidden_size=16, num_experts=6, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    undivided, divided = (Qwen3MoeExperts(Qwen3MoeConfig(**sizes)).double() for _ in range(2))
    rank_in_group, half = layout.rank("expert"), slice(3 * layout.rank("expert"), 3 * layout.rank("expert") + 3)
    generator = torch.Generator().manual_seed(1)
    directions = {name: torch.randn(p.shape, generator=generator).double() for name, p in undivided.named_parameters()}
    for name, parameter in list(undivided.named_parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
        setattr(divided, name, torch.nn.Parameter(parameter.detach()[half].clone()))
    mark_sharded(divided)
    undivided.config._experts_implementation, divided.config._experts_implementation = "eager", OUR_EXPERTS
    rank, num_experts = layout.rank("shards"), (6, 0, 3, 0)[layout.rank("shards")]  # of the first block in group 2
    scores = torch.rand(7 * (num_experts > 0), max(num_experts, 2), generator=generator.manual_seed(rank))
    weights, chosen = scores.double().topk(2)
    x, d_x = torch.randn(2, len(chosen), 16, generator=generator).double()
    output, tangent, gradient = differentiate(divided, x, d_x if len(x) else None, chosen, weights, half, directions)
    inputs = layout.gather_objects("shards", (x, d_x, chosen, weights))
    everything = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
    expected = differentiate(undivided, *everything, slice(None), directions)
    start = sum(len(one[0]) for one in inputs[:rank])
    errors = {
        "value": (output - expected[0][start : start + len(x)]).abs().sum(),
        "tangent": (tangent - expected[1][start : start + len(x)]).abs().sum(),
    }
    for name, one in gradient.items():
        summed = sum(layout.gather_objects("shards", one)[rank_in_group::2])
        errors[f"gradient of {name}"] = (summed - expected[2][name][half]).abs().sum()
    return {name: float(error) for name, error in errors.items()}


def differentiate(
    experts: torch.nn.Module, x: Tensor, d_x: Tensor | None, chosen: Tensor, weights: Tensor, half: slice, directions
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Value, tangent, and gradient of the parameters: our experts as in the fused pass, others by PyTorch's rules."""
    context = UnrecordedTangents() if uses_our_experts(experts) else nullcontext()
    parameters = dict(experts.named_parameters())
    # The rows are the output of an earlier layer, and require a gradient.
    x = x.clone().requires_grad_()
    with forward_ad.dual_level():
        for name, parameter in parameters.items():
            experts.__dict__[name] = make_dual(parameter, directions[name][half])
        with context:
            output = experts(x if d_x is None else make_dual(x, d_x), chosen, weights)
        value, tangent = forward_ad.unpack_dual(output)
        tangent = torch.zeros_like(value) if tangent is None else tangent.detach()
    gradients = torch.autograd.grad(value.sin().sum(), [x, *parameters.values()])[1:]
    return value.detach(), tangent, dict(zip(parameters, gradients, strict=True))


def test_ranks_without_tokens_take_part_in_a_layer(results):
    for errors in (result["layer"] for result in results):
        assert max(errors.values()) < 1e-11, errors
    assert len(results[0]["layer"]) == 4


def start(folder: Path, expert: int) -> tuple[Engine, Estimator]:
    start_process_group(10, expert=expert)
    recipe = step_runs.make_recipe()
    options = dict(dtype=torch.float32, attention="auto", gradient_checkpointing=False)
    model = TokenLossModel(load_sharded(str(folder / "model"), tiny.deepspeed_config(), **options))
    partition_experts(model)
    engine = step_runs.make_engine(model, recipe)
    return engine, step_runs.make_estimator(recipe, engine)


def write_and_close(folder: Path, engine: Engine, estimator: Estimator, expert: int) -> None:
    model = str(folder / "model")
    write_state(state_tensors(engine, estimator.direction), folder / f"state_{expert}")
    save_hugging_face(engine, load_tokenizer(model), model, folder / f"result_{expert}", max_file_bytes=30_000)
    engine.close()


def train_and_write(folder: Path) -> None:
    """Take two steps with experts divided in 2; write a checkpoint and an export."""
    engine, estimator = start(folder, 2)
    for seed in (1, 2):
        batches = StepBatches(
            step_runs.deal(tiny.make_batch(8, seed=seed), 2), step_runs.deal(tiny.make_batch(4, seed=9), 1)
        )
        step_runs.train_step(engine, step_runs.make_recipe(), batches, estimator, learning_rate=1e-2)
    write_and_close(folder, engine, estimator, 2)


def read_and_write(folder: Path, expert: int) -> None:
    """Read that checkpoint at another expert-parallel size, and write it and an export again."""
    engine, estimator = start(folder, expert)
    read_state(engine, estimator.direction, folder / "state_2", num_updates=2)
    write_and_close(folder, engine, estimator, expert)


@pytest.mark.parametrize("expert", [1, 4])
def test_a_checkpoint_read_at_another_expert_parallel_size_is_written_the_same(results, folder: Path, expert: int):
    expected, again = (resumed_runs.load_state_tensors(folder / name) for name in ("state_2", f"state_{expert}"))
    assert expected.keys() == again.keys()
    assert {name.split(".")[0] for name in expected} == {"master", "exp_avg", "exp_avg_sq", "direction"}
    for name, tensor in expected.items():
        assert tensor.any() and torch.equal(again[name], tensor), name


@pytest.mark.parametrize("expert", [1, 4])
def test_exports_are_equal_byte_for_byte(results, folder: Path, expert: int):
    names = {path.name for path in (folder / "result_2").glob("*.safetensors")}
    assert len(names) > 1
    for name in names | {"config.json"}:
        expected = (folder / "result_2" / name).read_bytes()
        assert (folder / f"result_{expert}" / name).read_bytes() == expected, name


def reroute_recomputed_layer() -> str:
    """Message of a step whose tokens all choose the first expert when their layer is recomputed."""
    run_at_experts = experts.run_at_experts

    def run_at_others(x: Tensor, chosen: Tensor, *arguments: Any) -> Tensor:
        is_recomputed = torch._C._current_graph_task_id() != -1
        return run_at_experts(x, torch.zeros_like(chosen) if is_recomputed else chosen, *arguments)

    with patch.object(experts, "run_at_experts", run_at_others), pytest.raises(UserError) as error:
        run_case(Case(expert=2, moe_kind=QWEN, checkpointing=True, sections={"method": {"name": "sft"}}))
    return str(error.value)


def test_a_recomputed_layer_that_routes_otherwise_is_refused(results):
    for result in results:
        assert result["other experts"].startswith(
            "model.gradient_checkpointing: found a layer whose recomputation routed"
        )


def collect_refusals() -> list[str]:
    """Messages for models whose experts cannot be divided."""
    messages = []
    for expert, model in (
        (2, tiny.token_loss_model()),
        (4, tiny.token_loss_model(moe_kind=QWEN)),
        (2, tiny.token_loss_model(moe_kind=QWEN, lora=True)),
    ):
        start_process_group(10, expert=expert)
        with pytest.raises(UserError) as error:
            partition_experts(model)
        messages.append(str(error.value))
    return messages


def test_experts_that_cannot_be_divided_are_refused(results):
    dense, indivisible, adapted = results[0]["refused"]
    assert dense.startswith("parallel.expert: found 2 on a model without experts")
    assert "found 4 on a model with 6 experts a layer; expected a divisor of 6" in indivisible
    assert "found 2 with adapters on experts; expected 1, or lora.target_modules without experts" in adapted
