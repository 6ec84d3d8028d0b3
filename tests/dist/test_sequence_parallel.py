"""Sequence parallelism: steps against the oracle at every sequence-parallel size, models, dropout, and exchanges."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers import step_runs, tiny, weightings
from tests.helpers.parity import Case, assert_parity, run_case
from tests.helpers.ranks import run_ranks
from tests.helpers.soak import soak
from tests.unit.test_attention import CONFIGS
from vcore_ds.data.batches import IGNORED_LABEL, Batch, StepBatches
from vcore_ds.distributed import layout
from vcore_ds.models.attention import FORWARD_MODE_ATTENTION, TRAINING_ATTENTION, SequenceLayout
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.sequence_exchange import gather_losses, take_local_columns
from vcore_ds.planning.batch_layout import list_sequence_parallel_sizes
from vcore_ds.training.step import take_direction
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import compute_jvp_utilities
from vcore_ds.utility.forward_mode import compute_losses_and_utilities, forward_mode

pytestmark = pytest.mark.dist

FINITE_DIFFERENCE = {"utility": {"estimator": "finite_difference", "epsilon": 5.0}}
SGD = {"optimizer": {"learning_rate": step_runs.LEARNING_RATE, "name": "sgd"}}
BATCH_WIDE = {
    "kl_budget": 0.1,
    "scope": "sequence_and_batch",
    "batch_kl_budget": 0.1,
    "base_measure": "dft",
    "normalization": "token",
}
CASES = {
    "2 and 4, adam, clipped, packed": Case(
        sequence_parallel=(2, 4), packed=True, sections={"probe": {"direction": "adam", "clip": 1.0}}
    ),
    "4 and 4, lora, packed, checkpointed": Case(
        sequence_parallel=(4, 4), packed=True, lora=True, checkpointing=True, num_main=4, num_probe=3
    ),
    "2 and 1, one kv head, coalesced, an idle group": Case(
        sequence_parallel=(2, 1), num_kv_heads=1, coalesce=True, num_main=5, num_probe=1
    ),
    "4 and 4, 4 kv heads, checkpointed, merged passes": Case(
        sequence_parallel=(4, 4),
        num_kv_heads=4,
        packed=True,
        checkpointing=True,
        batches_per_utility_pass=2,
        num_main=6,
        max_steps=1,
        sections={"utility": {"fused": False}},
    ),
    "finite difference, 4 and 4, checkpointed": Case(
        sequence_parallel=(4, 4), checkpointing=True, num_main=4, max_steps=1, sections=FINITE_DIFFERENCE
    ),
} | soak(
    {
        "finite difference, 4 and 4, lora, checkpointed": Case(
            sequence_parallel=(4, 4), lora=True, checkpointing=True, sections=FINITE_DIFFERENCE
        )
    }
)
OF_METHODS = {
    "custom, 2 and 2": Case(sequence_parallel=(2, 2), packed=True, sections={"method": weightings.FOCAL}),
    "alpha of micro-batches": Case(
        sequence_parallel=(2, 2),
        packed=True,
        sections={
            "method": {"kl_budget": 0.3, "alpha": "variance", "alpha_scope": "micro_batch"},
            "batch": {"micro_batch_size_per_rank": 2},
        },
    ),
    "iw_sft, lora": Case(
        sequence_parallel=(2, 1), lora=True, sections={"method": {"name": "iw_sft"}, "lora": {"rank": 4, "alpha": 8}}
    ),
    "stored, packed": Case(
        sequence_parallel=(2, 1),
        packed=True,
        sections={
            "method": {"name": "stored", "normalization": "token"},
            "data": {"train_path": "none", "token_weights": "none"},
        },
    ),
    "asft, lora": Case(
        sequence_parallel=(2, 1), lora=True, sections={"method": {"name": "asft"}, "lora": {"rank": 4, "alpha": 8}}
    ),
    "eaft, packed": Case(sequence_parallel=(2, 1), packed=True, sections={"method": {"name": "eaft"}}),
}
"""Cases of how a group weights the tokens of its packs, for which a layer and, but for iw-SFT's ratio, a step do."""
CASES |= {
    name: replace(case, num_layers=1, max_steps=2 if name.startswith("iw_sft") else 1)
    for name, case in OF_METHODS.items()
}


def measure_model(name: str) -> dict[int, tuple[float, float, float]]:
    """Largest deviations of losses, gradients and utilities from those of a single rank, by sequence-parallel size."""
    torch.manual_seed(0)
    model = TokenLossModel(AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=TRAINING_ATTENTION))
    trained = list(model.parameters())
    losses: dict[int, Tensor] = {}
    gradients: dict[int, Tensor] = {}
    utilities: dict[int, Tensor] = {}
    direction = {key: torch.randn_like(value) for key, value in model.named_parameters()}
    for k in list_sequence_parallel_sizes(layout.size("shards"), model.base.config.num_attention_heads):
        batch = tiny.pack_rows(tiny.make_batch(3), [0, 1, 2], k)
        targets = batch.targets()
        arguments = (
            take_local_columns(batch.input_ids, k),
            take_local_columns(targets, k),
            take_local_columns(batch.position_ids(), k),
            SequenceLayout.from_lengths(batch.sequence_lengths(), k, torch.device("cpu")),
        )
        losses[k] = gather_losses(model(*arguments), targets != IGNORED_LABEL, k)
        weight = torch.linspace(0.5, 1.5, len(losses[k]))
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad((losses[k] * weight).sum(), trained)])
        # Ranks sum their gradients as ZeRO-3 does; at k = 1 each rank has the complete one.
        dist.all_reduce(gradient)
        gradients[k] = gradient * k / dist.get_world_size()
        model.base.config._attn_implementation = FORWARD_MODE_ATTENTION
        with torch.no_grad(), forward_ad.dual_level():
            duals = {key: forward_ad.make_dual(x.detach(), direction[key]) for key, x in model.named_parameters()}
            local_losses = torch.func.functional_call(model, duals, arguments)
            utilities[k] = forward_ad.unpack_dual(gather_losses(local_losses, targets != IGNORED_LABEL, k)).tangent
        model.base.config._attn_implementation = TRAINING_ATTENTION
    return {
        k: (
            float((losses[k] - losses[1]).detach().abs().max()),
            step_runs.relative_error(gradients[k], gradients[1]),
            step_runs.relative_error(utilities[k], utilities[1]),
        )
        for k in losses
        if k > 1
    }


def measure_bf16_agreement() -> dict[int, float]:
    """Spearman correlation of utilities in bf16 with those in fp32 on one rank per pack, along one direction, by
    sequence-parallel size."""
    recipe = step_runs.make_recipe(model={"path": "none", "precision": "bf16"})
    engine = step_runs.make_engine(tiny.token_loss_model(dtype=torch.bfloat16), recipe)
    direction = Direction(engine)
    direction.compute(
        step_runs.deal(tiny.make_batch(8, num_tokens=128, seed=5), 2), normalization="sequence", clip=None
    )
    result: dict[int, Tensor] = {}

    def join(batches: list[Batch], utilities: list[Tensor]) -> Tensor:
        """Utilities of all ranks' tokens, in the order of the sequences."""
        local = {}
        for batch, values in zip(batches, utilities, strict=True):
            for row, sequence_id in enumerate(batch.sequence_ids):
                local[sequence_id] = values[batch.sequence_index() == row]
        together = {
            i: values for rank_values in layout.gather_objects("job", local) for i, values in rank_values.items()
        }
        return torch.cat([together[i] for i in sorted(together)])

    for k in (1, 2, 4):
        batches = step_runs.deal(tiny.make_batch(16, num_tokens=128), 2, k)
        result[k] = join(batches, compute_jvp_utilities(engine, direction, batches))
    batches = step_runs.deal(tiny.make_batch(16, num_tokens=128), 2, 1)
    with forward_mode(engine, direction, torch.float32):
        exact = join(batches, [compute_losses_and_utilities(engine, batch)[1] for batch in batches])
    engine.close()
    return {k: float(spearmanr(values, exact).statistic) for k, values in result.items()}


def train_with_dropout(sequence_parallel: int, *, packed: bool) -> list[float]:
    """Take two steps with dropout on adapters and activation checkpoints; returns their losses."""
    recipe = step_runs.make_recipe(method={"name": "sft"})
    model = tiny.token_loss_model(lora=True, dropout=0.3, checkpointing=True)
    engine = step_runs.make_engine(model, recipe)
    estimator, result = step_runs.make_estimator(recipe, engine), []
    for k in range(2):
        main = step_runs.deal(tiny.make_batch(8, seed=10 + k), 4, sequence_parallel, packed=packed)
        metrics = step_runs.train_step(
            engine, recipe, StepBatches(main, []), estimator, learning_rate=1e-3, seed=100 + k
        )
        result.append(metrics.values["loss"])
    engine.close()
    return result


@contextmanager
def counting_exchanges() -> Iterator[dict[str, list[int]]]:
    """Record the number of elements that this rank hands to each exchange inside the block, by kind."""
    result: dict[str, list[int]] = {"all_to_all": [], "all_gather": []}

    def counting(kind: str, exchange: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def count(axis: str, tensor: Tensor, sequence_parallel: int) -> Tensor:
            result[kind].append(tensor.numel())
            return exchange(axis, tensor, sequence_parallel)

        return count

    with mock.patch.multiple(layout, **{kind: counting(kind, getattr(layout, kind)) for kind in result}):
        yield result


def count_exchanges(*sizes: int) -> dict[int, dict[str, dict[str, list[int]]]]:
    """Count the elements that one sequence of 32 tokens exchanges, by sequence-parallel size and pass."""
    recipe = step_runs.make_recipe(utility={"fused": False})
    engine = step_runs.make_engine(tiny.token_loss_model(checkpointing=True), recipe)
    estimator, results = step_runs.make_estimator(recipe, engine), {}
    for size in sizes:
        batch = replace(tiny.take_rows(tiny.make_batch(1, num_tokens=32), [0]), sequence_parallel=size)
        result = results[size] = {}
        with engine.accumulation(1):
            with counting_exchanges() as result["forward"]:
                losses = engine.token_losses(batch)
            with counting_exchanges() as result["backward"]:
                engine.backward(losses.sum())
        take_direction(estimator.direction, recipe.method, recipe.probe, [batch])
        with counting_exchanges() as result["jvp"]:
            estimator.begin([batch])
    engine.close()
    return results


def measure_model_on_three_ranks(name: str) -> dict[int, tuple[float, float, float]]:
    layout.make_sequence_groups([3])
    return measure_model(name)


def run_all() -> dict[str, Any]:
    sizes = [k for k in (1, 2, 4, 8) if layout.size("shards") % k == 0]
    layout.make_sequence_groups(sizes)
    layout.make_sequence_groups(sizes)  # existing groups stay
    if layout.size("shards") == 1:
        return {"dropout": {"1 rank": train_with_dropout(1, packed=False)}}
    return {
        "cases": {name: run_case(case) for name, case in CASES.items()},
        "models": {name: measure_model(name) for name in CONFIGS},
        "dropout": {
            f"sequence-parallel size {k}, packed {packed}": train_with_dropout(k, packed=packed)
            for k, packed in ((1, True), (2, False), (4, True))
        },
        "bf16": measure_bf16_agreement(),
        "exchanges": count_exchanges(2, 4),
        "sums": [layout.sum_over("data", [1.0, float(layout.rank("data", k)), math.inf], k) for k in sizes],
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run_all, 4)


@pytest.mark.parametrize("name", CASES)
def test_a_step_on_4_ranks_equals_the_reference(results, name: str) -> None:
    assert_parity([result["cases"][name] for result in results])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_computes_the_same_at_every_sequence_parallel_size(results, name: str) -> None:
    every_rank = [result["models"][name] for result in results]
    if not every_rank[0]:  # 4 ranks cannot divide its heads, but 3 can
        every_rank = run_ranks(measure_model_on_three_ranks, 3, name)
    for rank, deviations in enumerate(every_rank):
        print(f"rank {rank}: {deviations}")
        assert deviations
        for losses, gradients, utilities in deviations.values():
            assert losses < 1e-6 * 5  # nats, of losses near 5
            assert max(gradients, utilities) < 1e-5


def test_dropout_is_equal_at_every_sequence_parallel_and_world_size(results) -> None:
    expected = run_ranks(run_all, 1)[0]["dropout"]["1 rank"]
    assert len(set(expected)) == 2
    for result in results:
        for name, losses in result["dropout"].items():
            assert losses == pytest.approx(expected, abs=1e-5), name


def test_bf16_utilities_are_as_accurate_as_on_one_rank(results) -> None:
    for result in results:
        print(result["bf16"])
        assert result["bf16"][1] > 0.98
        for k in (2, 4):
            assert result["bf16"][k] == pytest.approx(result["bf16"][1], abs=0.002)


def test_sums_over_data_count_a_row_once(results) -> None:
    for result in results:
        assert result["sums"] == [[4.0, 6.0, math.inf], [2.0, 1.0, math.inf], [1.0, 0.0, math.inf]]


@pytest.mark.parametrize("k", [2, 4])
def test_a_pass_exchanges_what_docs_parallelism_says(results, k: int) -> None:
    """Two all-to-alls per layer: of queries, keys and values, and of the output."""
    num_layers, num_heads, num_kv_heads, head_dim, num_tokens = 2, 4, 2, 8, 32
    before = num_tokens // k * head_dim * (num_heads + 2 * math.lcm(num_kv_heads, k))
    after = num_tokens // k * head_dim * num_heads
    layer = [before, after]
    for result in results:
        passes = result["exchanges"][k]
        assert passes["forward"] == {"all_to_all": layer * num_layers, "all_gather": [num_tokens // k]}
        # A checkpointed layer runs again before its own backward.
        assert passes["backward"] == {"all_to_all": [*layer, after, before] * num_layers, "all_gather": []}
        both = [2 * n for n in layer]
        assert passes["jvp"] == {"all_to_all": both * num_layers, "all_gather": [num_tokens // k] * 2}
