"""Low-rank directions on 1, 2 and 4 ranks: factors computed on shards against those of the unsharded matrices, and
utilities along them against plain PyTorch in fp64 along the same matrices."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.helpers import megatron, step_runs, tiny
from tests.helpers.oracle import Reference
from tests.helpers.ranks import run_ranks
from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.engine.checkpoint_shards import count_local_bytes, read_state, state_tensors, write_state
from vcore_ds.engine.deepspeed_start import start_deepspeed
from vcore_ds.engine.flat_shards import is_expert_block
from vcore_ds.engine.sharded_loading import partition_experts
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.dual_tensors import LowRank
from vcore_ds.training.setup import build_estimator
from vcore_ds.training.step import take_direction
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.low_rank import has_low_rank, orthonormalize

pytestmark = pytest.mark.dist

RANK, SEED = 5, 11
NUM_ROWS = 4


@dataclass(frozen=True)
class Case:
    rank: int = RANK
    fused: bool = True
    checkpointing: bool = False
    tied: bool = False
    packed: bool = False
    passes: int = 1
    moe_kind: str | None = None
    sequence_parallel: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def min_ranks(self) -> int:
        """Ranks that the case needs: with tensor or expert parallelism, ZeRO-3 also shards each part over two ranks."""
        return self.sequence_parallel if self.tensor * self.expert == 1 else 4

    def make_plain_model(self) -> torch.nn.Module:
        return tiny.qwen3(tied=self.tied) if self.moe_kind is None else tiny.moe_model(self.moe_kind)


CASES = {
    "fused": Case(),
    "separate, tied": Case(fused=False, tied=True),
    "checkpointed, packed": Case(checkpointing=True, packed=True),
    "MoE model, packed": Case(moe_kind="qwen3_moe", packed=True),
    "MoE model, most experts idle, separate": Case(moe_kind="qwen3_moe, idle experts", fused=False),
    "2 sequence-parallel ranks": Case(sequence_parallel=2),
    "rank above every matrix": Case(rank=64),
    "two passes, MoE model, checkpointed": Case(passes=2, moe_kind="qwen3_moe", checkpointing=True),
    "tensor-parallel, packed": Case(tensor=2, packed=True),
    "tensor-parallel, tied, separate, checkpointed": Case(tensor=2, tied=True, fused=False, checkpointing=True),
    "experts on 2 ranks": Case(expert=2, moe_kind="qwen3_moe"),
    "experts on 2 ranks, most of them idle, separate": Case(expert=2, moe_kind="qwen3_moe, idle experts", fused=False),
}


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Take a direction and the utilities along its factors; write a checkpoint of it to `folder` and read it again."""
    probe_section = {"rank": case.rank, "rank_passes": case.passes}
    recipe = step_runs.make_recipe(probe=probe_section, utility={"fused": case.fused})
    start_process_group(10, case.tensor, case.expert)
    layout.make_sequence_groups([case.sequence_parallel])
    model, plain = make_model(case), case.make_plain_model()
    engine = step_runs.make_engine(model, recipe)
    estimator = build_estimator(recipe.method, recipe.probe, recipe.utility, engine)
    direction = estimator.direction
    probe = step_runs.deal(tiny.make_batch(2, seed=9), 1)
    taken = take_direction(direction, recipe.method, recipe.probe, probe, seed=SEED)
    batches = step_runs.deal(tiny.make_batch(NUM_ROWS), 2, case.sequence_parallel, packed=case.packed)
    utilities: dict[int, torch.Tensor] = {}
    forward = estimator.begin(batches)
    with engine.accumulation(len(batches)):
        for k, batch in enumerate(batches):
            result = forward.run(k)
            sizes = batch.num_supervised_tokens().tolist()
            utilities |= dict(zip(batch.sequence_ids, result.utilities.split(sizes), strict=False))
            engine.backward(result.losses.sum())
    bytes_kept = count_kept_bytes(engine, direction)
    exact_tangents, factor_products, replicas = {}, {}, []
    exact = Direction(engine, rank_passes=case.passes)
    take_direction(exact, recipe.method, recipe.probe, probe, seed=SEED)
    for group in range(len(exact.groups)):
        gathered = exact.finish_gather(exact.start_gather(group))
        for name, parameter in engine.trainable:
            if id(parameter) in gathered:
                tangent = direction.low_rank_tangents()[id(parameter)]
                key = name.removeprefix("causal_lm.")
                exact_tangents[key] = gathered[id(parameter)].clone()
                factor_products[key] = tangent.matrix() if isinstance(tangent, LowRank) else tangent.clone()
                assert isinstance(tangent, LowRank) == has_low_rank(parameter, case.rank)
                if is_expert_block(parameter):
                    exact_tangents[key], factor_products[key] = (
                        torch.cat(layout.gather_objects("expert", x))
                        for x in (exact_tangents[key], factor_products[key])
                    )
                elif not getattr(parameter, "tensor_model_parallel", False):
                    replicas.append(key)
    # A direction whose shards are kept gives the same factors, bit for bit.
    assert_equal_factors(direction, exact.with_rank(case.rank))
    tensors = state_tensors(engine, direction)
    write_state(tensors, folder)
    written = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    counted = sum(layout.gather_objects("job", count_local_bytes(tensors)))
    assert 0 <= written - counted <= 3000 * len(tensors) * layout.size("job")  # headers
    resumed = Direction(engine, case.rank, case.passes)
    read_state(engine, resumed, folder, num_updates=0)
    assert_equal_factors(direction, resumed)
    along = megatron.assemble(model, plain, factor_products) if case.tensor > 1 else factor_products
    engine.close()
    return {
        "utilities": utilities,
        "exact": exact_tangents,
        "approximate": factor_products,
        "along": along,
        "replicas": replicas,
        "energy": taken.energy,
        "bytes_kept": bytes_kept,
    }


def assert_equal_factors(one: Direction, other: Direction) -> None:
    """Compare two directions' factors bit for bit."""
    tangents, others = one.low_rank_tangents(), other.low_rank_tangents()
    assert tangents.keys() == others.keys()
    for key, tangent in tangents.items():
        both = (x if isinstance(x, LowRank) else (x,) for x in (tangent, others[key]))
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(*both, strict=True))


def count_kept_bytes(engine: Engine, direction: Direction) -> dict[str, int]:
    """Bytes that the direction keeps alive, bytes that it reports, and bytes by the shapes of its factors and of the
    parameters without factors."""
    by_address = {}
    factors = [x for t in direction.low_rank_tangents().values() for x in (t if isinstance(t, LowRank) else (t,))]
    for tensor in (*direction.buffers, *factors):
        storage = tensor.untyped_storage()
        by_address[storage.data_ptr()] = storage.nbytes()
    expected = 0
    for _, parameter in engine.trainable:
        *stack, out, in_ = (1, *parameter.ds_shape)
        low_rank = has_low_rank(parameter, direction.rank)
        expected += torch.Size(stack).numel() * (direction.rank * (out + in_) if low_rank else out * in_)
    size = engine.trainable[0][1].element_size()
    return {"alive": sum(by_address.values()), "reported": direction.persistent_bytes, "expected": size * expected}


def make_model(case: Case) -> torch.nn.Module:
    options = dict(checkpointing=case.checkpointing)
    if case.tensor > 1:
        return megatron.make_parallel_model(case.make_plain_model(), **options)
    model = tiny.token_loss_model(tied=case.tied, moe_kind=case.moe_kind, **options)
    if case.expert > 1:
        start_deepspeed()
        deepspeed.zero.Init(module=model, config_dict_or_path=tiny.deepspeed_config(bf16=False))
    partition_experts(model)
    return model


def measure_all(folder: Path) -> dict[str, dict[str, Any]]:
    num_ranks = layout.size("shards")
    return {
        name: measure(case, folder / str(i))
        for i, (name, case) in enumerate(CASES.items())
        if case.min_ranks <= num_ranks
    }


@pytest.fixture(scope="module", params=[1, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(measure_all, request.param, tmp_path_factory.mktemp("states"))


def test_factors_are_the_projection_of_the_unsharded_matrices(ranks) -> None:
    for name, case in CASES.items():
        if name not in ranks[0]:
            continue
        kept = total = 0.0
        for i, measured in enumerate(result[name] for result in ranks):
            for key, gradient in measured["exact"].items():
                expected = gradient.double()
                if gradient.ndim >= 2 and min(gradient.shape[-2:]) > case.rank:
                    width = gradient.shape[-1]
                    generator = torch.Generator().manual_seed(torch_seed(Stream.LOW_RANK_START, SEED, width))
                    start = torch.randn(width, case.rank, generator=generator).double()
                    for _ in range(case.passes):
                        basis = torch.linalg.qr(expected @ start).Q
                        start = expected.mT @ basis
                    expected = basis @ (basis.mT @ expected)
                error = float((measured["approximate"][key] - expected).norm() / gradient.norm().clamp(min=1e-12))
                # The fp32 rounding of the sketch, times the condition number of an expert's gradient from few tokens.
                assert error < 5e-5, (name, key, error)
                # The ranks of a tensor-parallel group have different matrices; of equal ones, one counts.
                if i == 0 or (i < case.tensor and key not in measured["replicas"]):
                    kept += float(expected.square().sum())
                    total += float(gradient.double().square().sum())
        energy = kept / total
        for measured in (result[name] for result in ranks):
            assert measured["energy"] == pytest.approx(energy, rel=1e-5)
        assert case.rank == RANK or energy == pytest.approx(1.0, abs=1e-6)
        # A second pass keeps more.
        if case.passes == 2:
            assert energy > ranks[0]["MoE model, packed"]["energy"] + 0.01


def test_utilities_are_exact_along_the_factors(ranks) -> None:
    """Against forward mode of the plain model in fp64, along the matrices that the same factors multiply to."""
    for name, case in CASES.items():
        if name not in ranks[0]:
            continue
        model = case.make_plain_model().double()
        model.set_attn_implementation("eager")
        if case.moe_kind is not None:
            model.set_experts_implementation("eager")
        reference = Reference(model, torch.optim.SGD(model.parameters()))
        along = {key: tangent.double() for key, tangent in ranks[0][name]["along"].items()}
        expected = reference.utilities(tiny.make_batch(NUM_ROWS), along)
        measured: dict[int, torch.Tensor] = {}
        for result in ranks:
            measured |= result[name]["utilities"]
        assert sorted(measured) == list(range(NUM_ROWS))
        scale = max(float(s.abs().max()) for s in expected)
        errors = [float((measured[i] - s).abs().max()) / scale for i, s in enumerate(expected)]
        assert max(errors) < 2e-6, (name, errors)


def test_the_shard_is_freed_once_the_factors_exist(ranks) -> None:
    """Also where a view of it would keep its memory alive, as on one rank."""
    for result in ranks:
        for name, measured in result.items():
            kept = measured["bytes_kept"]
            assert kept["alive"] == kept["reported"] == kept["expected"], name


def test_factors_are_equal_on_all_ranks(ranks) -> None:
    for name in ranks[0]:
        first = ranks[0][name]["along"]
        for result in ranks[1:]:
            assert all(torch.equal(tangent, result[name]["along"][key]) for key, tangent in first.items())


@pytest.mark.parametrize("kind", ["zeros", "one column", "ill-conditioned", "tiny"])
def test_a_basis_is_orthonormal_and_spans_the_matrix(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sketch = torch.randn(3, 40, 8, generator=generator)
    if kind == "zeros":
        sketch[1] = 0.0
    elif kind == "one column":
        sketch[1] = sketch[1, :, :1]
    elif kind == "ill-conditioned":
        sketch[1] *= 10.0 ** -torch.arange(8.0)
    else:
        sketch[1] *= 1e-30
    basis = orthonormalize(sketch).double()
    assert float((basis.mT @ basis - torch.eye(8)).abs().max()) < 1e-5
    # No part of the matrix lies outside the basis.
    outside = sketch.double() - basis @ (basis.mT @ sketch.double())
    assert float(outside.norm(dim=(1, 2)).max()) <= 1e-5 * float(sketch.norm(dim=(1, 2)).max())
