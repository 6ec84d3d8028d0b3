"""One fused forward for losses and utilities against two separate ones."""

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from tests.helpers import step_runs, tiny, weightings
from tests.helpers.allocations import Allocations
from tests.helpers.ranks import run_ranks
from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import StepBatches, collate
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.planning.settings import ActivationMemory
from vcore_ds.training.setup import build_estimator
from vcore_ds.training.start_checks import take_ending
from vcore_ds.training.step import take_direction
from vcore_ds.utility.derivative_check import Derivatives, compare_derivatives
from vcore_ds.utility.estimators import NoUtilities, why_not_fused
from vcore_ds.utility.forward_mode import compute_losses_and_utilities, forward_mode

pytestmark = pytest.mark.dist

NUM_TOKENS = 64


@dataclass(frozen=True)
class Pass:
    lora: bool = False
    checkpointing: bool = False
    precision: str = "fp32"
    packed: bool = False
    sequence_parallel: int = 1
    tied: bool = False
    moe_kind: str | None = None
    """Kind of an MoE model, see `tiny.moe_model`."""
    tensor: int = 1
    """Tensor-parallel size, in megatron-core's parallel layers."""
    rank: int | None = None
    """Rank of the direction's factors."""
    stored: ActivationMemory | None = None

    def make_model(self, **sizes: int) -> torch.nn.Module:
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        if self.tensor > 1:
            from tests.helpers import megatron  # only here: megatron-core takes seconds to import

            plain = tiny.qwen3(tied=self.tied, dtype=dtype, **sizes)
            return megatron.make_parallel_model(plain, checkpointing=self.checkpointing)
        options = dict(lora=self.lora, checkpointing=self.checkpointing, tied=self.tied, dtype=dtype)
        model = tiny.token_loss_model(moe_kind=self.moe_kind, **options, **sizes)
        if self.stored is not None:
            model.store_activations(self.stored)
        return model


PASSES = {
    "full, tied, one of two layers checkpointed, packed, 2 sequence-parallel ranks": Pass(
        tied=True, checkpointing=True, packed=True, sequence_parallel=2, stored=ActivationMemory(2, 1)
    ),
    "MoE model, packed": Pass(moe_kind="qwen3_moe", packed=True),
    "MoE model, rank 4": Pass(moe_kind="qwen3_moe", rank=4),
    "MoE model, bf16, checkpointed": Pass(moe_kind="deepseek_v3", precision="bf16", checkpointing=True),
    "lora, tied, packed, 2 sequence-parallel ranks": Pass(lora=True, tied=True, packed=True, sequence_parallel=2),
    "lora, bf16, checkpointed, attention's output kept": Pass(
        lora=True, precision="bf16", checkpointing=True, stored=ActivationMemory(stores_attention=True)
    ),
}


def run_main_pass(case: Pass, fused: bool) -> dict[str, Any]:
    """Run one micro-batch forward and backward, then take a step."""
    precision = {"path": "none", "precision": case.precision}
    recipe = step_runs.make_recipe(model=precision, utility={"fused": fused}, probe={"rank": case.rank})
    engine = step_runs.make_engine(case.make_model(), recipe)
    estimator = build_estimator(recipe.method, recipe.probe, recipe.utility, engine)
    rows = tiny.make_batch(4, num_tokens=NUM_TOKENS)
    batch = step_runs.deal(rows, 2, case.sequence_parallel, packed=case.packed)[0]
    take_direction(
        estimator.direction,
        recipe.method,
        recipe.probe,
        step_runs.deal(tiny.make_batch(2, num_tokens=NUM_TOKENS, seed=9), 1),
    )
    results: dict[str, Any] = {"why not": why_not_fused(engine)}
    for _ in range(2):  # DeepSpeed learns the order of the modules in the first
        with engine.accumulation(1):
            result = estimator.begin([batch]).run(0)
            engine.backward((torch.softmax(0.3 * result.utilities, 0) * result.losses).sum())
        results |= {"losses": result.losses.detach(), "utilities": result.utilities}
        results["gradient"] = torch.cat([g.flatten().float() for g in engine.shards.gradients()])
    # Nothing of the dual forward may stay behind for later passes.
    assert not any(
        (module._parameters.keys() | {"forward"}) & module.__dict__.keys() for module in engine.module.modules()
    )
    metrics = step_runs.train_step(engine, recipe, StepBatches([batch], []), estimator)
    results["loss"] = metrics.values["loss"]
    engine.close()
    return results


MEASURED_PASSES = (Pass(True, False, "bf16"), Pass(False, True, "bf16", moe_kind="qwen3_moe"))
"""Passes whose memory is measured."""


def run_all() -> dict[str, Any]:
    peaks = {case: measure_peaks(case) for case in MEASURED_PASSES}
    layout.make_sequence_groups([1, 2])
    return {name: run_both_passes(case) for name, case in PASSES.items()} | {"peaks": peaks}


def run_both_passes(case: Pass) -> dict[bool, dict[str, Any]]:
    """Results of `run_main_pass`, fused (True) and separate (False)."""
    return {fused: run_main_pass(case, fused) for fused in (True, False)}


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return run_ranks(run_all, 2)


@pytest.mark.parametrize("name", PASSES)
def test_a_fused_forward_equals_two_separate_ones(results, name: str) -> None:
    assert_fused_equals_separate([rank_results[name] for rank_results in results], PASSES[name].precision)


def assert_fused_equals_separate(results: list[dict[bool, dict[str, Any]]], precision: str) -> None:
    """`results`: of `run_main_pass` on each rank, fused and separate."""
    exact = precision == "fp32"
    for rank_results in results:
        fused, separate = rank_results[True], rank_results[False]
        assert fused["why not"] is None
        deviations = {k: step_runs.relative_error(fused[k], separate[k]) for k in ("losses", "utilities", "gradient")}
        print(deviations)
        assert deviations["losses"] == 0.0  # those of the plain forward
        # In bf16 a separate pass has other activations: its attention is another kernel.
        assert deviations["utilities"] <= (1e-6 if exact else 1e-2)
        assert deviations["gradient"] <= (1e-5 if exact else 3e-2)
        assert fused["loss"] == pytest.approx(separate["loss"], rel=1e-5 if exact else 1e-2)


def find_tangents(rank: int | None) -> list[tuple[int, int]]:
    """Addresses of each layer's first tangent in a forward on one rank, and of the direction's copy: of the first
    weight, or with a low rank of the first norm."""
    recipe, addresses = step_runs.make_recipe(probe={"rank": rank}), []
    engine = step_runs.make_engine(tiny.token_loss_model(), recipe)
    direction = build_estimator(recipe.method, recipe.probe, recipe.utility, engine).direction

    def look(module: torch.nn.Module, _: object) -> None:
        tangent = forward_ad.unpack_dual(module.weight).tangent
        parameter = module._parameters["weight"]
        kept = direction.shard(parameter) if rank is None else direction.low_rank_tangents()[id(parameter)]
        addresses.append((tangent.data_ptr(), kept.data_ptr()))

    with forward_mode(engine, direction):
        for layer in engine.module.layers:
            (layer.self_attn.q_proj if rank is None else layer.input_layernorm).register_forward_pre_hook(look)
        compute_losses_and_utilities(engine, step_runs.deal(tiny.make_batch(2), 2)[0])
    engine.close()
    return addresses


def run_on_one_rank() -> dict[str, Any]:
    return {
        "why not": find_reasons_for_separate_passes(),
        "entropies": collect_entropies_with_dropout(),
        "addresses": find_tangents(None) + find_tangents(4),
        "modes": compare_modes(),
        "message": read_outside_module(),
        "low rank": run_both_passes(Pass(rank=4)),
    }


@pytest.fixture(scope="module")
def results_on_one_rank() -> dict[str, Any]:
    return run_ranks(run_on_one_rank, 1)[0]


def compare_modes() -> dict[str, Derivatives]:
    """Derivatives of correct models, of one in which forward mode loses the tangents of some activations, and of one in
    which reverse mode drops the padding token of the tied input embedding. That token starts and ends the sequence, as
    in chat data; the model reads the first of the two alone."""
    modes, random = {}, np.random.default_rng(0)
    ids = random.integers(1, tiny.VOCABULARY, 61, dtype=np.int32)
    ids[[0, -1]] = tiny.PADDING
    feed: Any = SimpleNamespace(dataset=[TokenizedSequence(0, ids, np.arange(61) > 9)])
    for name in ("correct", "wrong", "tied", "tied, wrong", "bf16", "bf16, wrong", "lora", "lora, wrong"):
        recipe = step_runs.make_recipe(model={"path": "none", "precision": "bf16" if "bf16" in name else "fp32"})
        model = tiny.token_loss_model(
            moe_kind=None if "tied" in name or "lora" in name else "qwen3_moe",
            tied="tied" in name,
            lora="lora" in name,
            dtype=torch.bfloat16 if "bf16" in name else torch.float32,
        )
        if name == "tied, wrong":
            model.base.get_input_embeddings().padding_idx = tiny.PADDING
        elif "wrong" in name:
            model.layers[1].register_forward_hook(lambda module, _, output: forward_ad.unpack_dual(output).primal)
        engine = step_runs.make_engine(model, recipe)
        batch, similar = (collate([take_ending(engine, feed, 0, num_tokens)], tiny.PADDING) for num_tokens in (32, 31))
        if "lora" in name:  # its adapters begin with B = 0 and hide the tangents of A
            with engine.changing_shards():
                for parameter_name, parameter in engine.trainable:
                    if "lora_B" in parameter_name:
                        engine.shards.shard(engine.shards.parameters(), parameter).zero_()
        before = [shard.clone() for shard in engine.shards.parameters()]
        modes[name] = compare_derivatives(engine, batch, similar, fused=True)
        assert all(map(torch.equal, before, engine.shards.parameters()))
        engine.close()
    return modes


@pytest.mark.parametrize(
    ("name", "wrong", "least"),
    [("lora", "lora, wrong", 10), ("correct", "wrong", 100), ("tied", "tied, wrong", 10), ("bf16", "bf16, wrong", 2)],
    ids=["adapters", "forward", "reverse", "forward in bf16"],
)
def test_the_gradients_norm_shows_a_wrong_mode(results_on_one_rank, name: str, wrong: str, least: float) -> None:
    """`least`: times the tolerance."""
    right, modes = results_on_one_rank["modes"][name], results_on_one_rank["modes"][wrong]
    assert right.agree and right.forward == pytest.approx(right.reverse, rel=1e-6 if right.tolerance < 1e-3 else 0.05)
    assert not modes.agree
    assert abs(modes.forward / modes.reverse - 1) > least * modes.tolerance


def read_outside_module() -> str:
    """Message where a parent outside the layers reads the weight of a child that never runs."""
    recipe, model = step_runs.make_recipe(), tiny.token_loss_model()
    model.decoder.scale = torch.nn.Conv1d(1, 1, 1, bias=False)
    model.decoder.norm.register_forward_hook(
        lambda module, inputs, output: output * model.decoder.scale.weight.squeeze()
    )
    engine = step_runs.make_engine(model, recipe, persistence_threshold=100)
    try:
        compare_derivatives(engine, tiny.make_batch(1), tiny.make_batch(1), fused=True)
    except UserError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


def test_a_parameter_that_carries_no_tangent_is_named(results_on_one_rank) -> None:
    assert "reads causal_lm.model.scale.weight outside the module that owns it" in results_on_one_rank["message"]


def test_on_one_rank_a_low_rank_pass_gives_the_same_gradient(results_on_one_rank) -> None:
    """Vectors are copied there, so that their tangents need no zeros for all parameters."""
    assert_fused_equals_separate([results_on_one_rank["low rank"]], "fp32")


def test_on_one_rank_tangents_are_the_directions_memory(results_on_one_rank) -> None:
    """PyTorch would copy each of them into zeros as large as the memory that its parameter lies in, which on one rank
    is that of all parameters."""
    addresses = results_on_one_rank["addresses"]
    assert len(addresses) == 4 and all(tangent == shard for tangent, shard in addresses)


def find_reasons_for_separate_passes() -> list[str | None]:
    """Reasons why two models need a separate utility pass."""
    recipe, reasons = step_runs.make_recipe(), []
    eager = tiny.token_loss_model()
    eager.base.config._attn_implementation = "eager"
    for model in (eager, tiny.token_loss_model(lora=True, dropout=0.1)):
        engine = step_runs.make_engine(model, recipe)
        reasons.append(why_not_fused(engine))
        engine.close()
    return reasons


def test_other_attention_and_dropout_need_a_separate_pass(results_on_one_rank) -> None:
    attention, dropout = results_on_one_rank["why not"]
    assert "attention" in attention
    assert "dropout" in dropout


def collect_entropies_with_dropout() -> dict[str, torch.Tensor]:
    """Losses and entropies that a step gives to a custom weighting, and those of one forward with and without its
    dropout."""
    recipe = step_runs.make_recipe(method=weightings.UNCERTAIN)
    engine = step_runs.make_engine(tiny.token_loss_model(lora=True, dropout=0.3), recipe)
    estimator, recorder = step_runs.make_estimator(recipe, engine), step_runs.Recorder(engine)
    batch = tiny.make_batch(3, seed=7)
    options = dict(learning_rate=0.0, seed=5)
    step_runs.train_step(engine, recipe, StepBatches([batch], [batch]), estimator, recorder, **options)
    tokens, values = recorder.results[0].tokens, {}
    values["step"] = torch.stack([tokens.losses.detach(), tokens.statistics])
    with torch.no_grad():
        engine.seed_dropout(5)
        values["with dropout"] = torch.stack(engine.losses_and_statistics(batch, "entropy"))
    with engine.without_gradient():
        values["without dropout"] = torch.stack(engine.losses_and_statistics(batch, "entropy"))
    engine.close()
    return values


def test_entropies_are_of_the_forward_whose_losses_are_weighted(results_on_one_rank) -> None:
    values = results_on_one_rank["entropies"]
    torch.testing.assert_close(values["step"], values["with dropout"], rtol=1e-5, atol=1e-6)
    assert ((values["with dropout"] - values["without dropout"]).abs().amax(1) > 1e-3).all()


def measure_peaks(case: Pass, **changes: int) -> dict[str, int]:
    """Peak bytes of a main pass without utilities and with fused ones; `changes`: sizes of the model."""
    recipe = step_runs.make_recipe(model={"path": "none", "precision": case.precision})
    sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=8, head_dim=16)
    # Prefetched parameters take the same memory in both, but by default they would be half of this small model.
    engine = step_runs.make_engine(
        case.make_model(**sizes | changes), recipe, zero={"stage3_prefetch_bucket_size": 50_000}
    )
    estimator, plain = build_estimator(recipe.method, recipe.probe, recipe.utility, engine), NoUtilities(engine)
    batch = step_runs.deal(tiny.make_batch(4, num_tokens=512), 2)[0]
    take_direction(estimator.direction, recipe.method, recipe.probe, step_runs.deal(tiny.make_batch(2, seed=9), 1))
    peaks = {}
    for name, forward in (("plain", plain), ("fused", estimator)):
        allocations = Allocations()
        for counted in (nullcontext(), allocations):  # DeepSpeed learns the order of the modules in the first
            with counted, engine.accumulation(1):
                result = forward.begin([batch]).run(0)
                weights = 1.0 if result.utilities is None else torch.softmax(result.utilities, 0)
                engine.backward((result.losses * weights).sum())
        peaks[name] = allocations.peak_bytes
    engine.close()
    return peaks


def test_a_fused_pass_takes_at_most_five_percent_more_memory(results) -> None:
    """8 layers of 62 thousand parameters, 1,024 tokens: where activations weigh more than a layer's parameters."""
    for case, peaks in results[0]["peaks"].items():
        print(case, peaks, peaks["fused"] / peaks["plain"])
        assert peaks["fused"] <= 1.05 * peaks["plain"]
