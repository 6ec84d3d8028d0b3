"""Low-rank directions on 1, 2 and 4 ranks: factors found on shards against those of the whole matrices, and utilities
along them against plain PyTorch in fp64 along the same matrices."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import deepspeed
import pytest
import torch

from tests.helpers import megatron, step_runs, tiny
from tests.helpers.oracle import Reference
from tests.helpers.ranks import run_ranks
from tests.helpers.soak import IS_SOAK
from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.engine.deepspeed_start import start_deepspeed
from vcore_ds.engine.flat_shards import is_expert_block
from vcore_ds.engine.parallel_weights import partition_experts
from vcore_ds.models.dual_tensors import LowRank
from vcore_ds.train.settings import derive_step_settings
from vcore_ds.train.setup import build_estimator
from vcore_ds.train.step import take_direction
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
    mixture_of: str | None = None
    sequence_parallel: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def min_ranks(self) -> int:
        """With tensor or expert parallelism, ZeRO-3 shards each part over two ranks more."""
        return self.sequence_parallel if self.tensor * self.expert == 1 else 4

    def plain_model(self) -> torch.nn.Module:
        return tiny.qwen3(tied=self.tied) if self.mixture_of is None else tiny.mixture(self.mixture_of)


CASES = {
    "fused": Case(),
    "separate, tied": Case(fused=False, tied=True),
    "checkpointed, packed": Case(checkpointing=True, packed=True),
    "mixture, packed": Case(mixture_of="qwen3_moe", packed=True),
    "mixture, most experts idle, separate": Case(mixture_of="qwen3_moe, idle experts", fused=False),
    "row of 2 ranks": Case(sequence_parallel=2),
    "no matrix is larger": Case(rank=64),
    "two passes, mixture, checkpointed": Case(passes=2, mixture_of="qwen3_moe", checkpointing=True),
    "tensor-parallel, packed": Case(tensor=2, packed=True),
    "tensor-parallel, tied, separate, checkpointed": Case(tensor=2, tied=True, fused=False, checkpointing=True),
    "experts on 2 ranks": Case(expert=2, mixture_of="qwen3_moe"),
    "experts on 2 ranks, most of them idle, separate": Case(
        expert=2, mixture_of="qwen3_moe, idle experts", fused=False
    ),
}


def measure(case: Case) -> dict[str, Any]:
    probe_section = {"rank": case.rank, "rank_passes": case.passes}
    recipe = step_runs.recipe(probe=probe_section, utility={"fused": case.fused})
    start_process_group(10, case.tensor, case.expert)
    layout.make_sequence_groups([case.sequence_parallel])
    model, plain = make_model(case), case.plain_model()
    engine = step_runs.make_engine(model, recipe)
    estimator = build_estimator(derive_step_settings(recipe), engine)
    direction = estimator.direction
    probe = step_runs.deal(tiny.rows(2, seed=9), 1)
    taken = take_direction(direction, derive_step_settings(recipe), probe, seed=SEED)
    batches = step_runs.deal(tiny.rows(NUM_ROWS), 2, case.sequence_parallel, packed=case.packed)
    utilities: dict[int, torch.Tensor] = {}
    forward = estimator.begin(batches)
    with engine.accumulation(len(batches)):
        for k, batch in enumerate(batches):
            result = forward(k)
            sizes = batch.num_supervised_tokens().tolist()
            utilities |= dict(zip(batch.sequence_ids, result.utilities.split(sizes), strict=False))
            engine.backward(result.losses.sum())
    whole, approximate, replicas = {}, {}, []
    for group in range(len(direction.groups)):
        gathered = direction.finish_gather(direction.start_gather(group))
        for name, parameter in engine.trainable:
            if id(parameter) in gathered:
                tangent = direction.low_rank_tangents()[id(parameter)]
                key = name.removeprefix("causal_lm.")
                whole[key] = gathered[id(parameter)].clone()
                approximate[key] = tangent.matrix() if isinstance(tangent, LowRank) else tangent.clone()
                assert isinstance(tangent, LowRank) == has_low_rank(parameter, case.rank)
                if is_expert_block(parameter):
                    whole[key], approximate[key] = (
                        torch.cat(layout.gather_objects("expert", x)) for x in (whole[key], approximate[key])
                    )
                elif not getattr(parameter, "tensor_model_parallel", False):
                    replicas.append(key)
    # The same state gives the same factors again, to the last bit: what a resumed run does.
    resumed = Direction(engine, case.rank, case.passes)
    for mine, theirs in zip(resumed.buffers, direction.buffers, strict=True):
        mine.copy_(theirs)
    resumed.load_state(direction.state())
    again = resumed.low_rank_tangents()
    for parameter, tangent in direction.low_rank_tangents().items():
        both = (x if isinstance(x, LowRank) else (x,) for x in (tangent, again[parameter]))
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    along = megatron.whole(model, plain, approximate) if case.tensor > 1 else approximate
    engine.close()
    return {
        "utilities": utilities,
        "whole": whole,
        "approximate": approximate,
        "along": along,
        "replicas": replicas,
        "energy": taken.energy,
    }


def make_model(case: Case) -> torch.nn.Module:
    options = dict(checkpointing=case.checkpointing)
    if case.tensor > 1:
        return megatron.parallel_model(case.plain_model(), **options)
    model = tiny.token_loss_model(tied=case.tied, mixture_of=case.mixture_of, **options)
    if case.expert > 1:
        start_deepspeed()
        deepspeed.zero.Init(module=model, config_dict_or_path=tiny.deepspeed_config(bf16=False))
    partition_experts(model)
    return model


def measure_all() -> dict[str, dict[str, Any]]:
    num_ranks = layout.size("shards")
    return {name: measure(case) for name, case in CASES.items() if case.min_ranks <= num_ranks}


@pytest.fixture(scope="module", params=[1, 4, *([2] if IS_SOAK else [])])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(measure_all, request.param)


def test_factors_are_the_projection_of_the_whole_matrices(ranks) -> None:
    for name, case in CASES.items():
        if name not in ranks[0]:
            continue
        kept: dict[str, float] = defaultdict(float)
        total: dict[str, float] = defaultdict(float)
        for i, found in enumerate(of_rank[name] for of_rank in ranks):
            for key, gradient in found["whole"].items():
                expected, kinds = gradient.double(), ["total"]
                if gradient.ndim >= 2 and min(gradient.shape[-2:]) > case.rank:
                    width = gradient.shape[-1]
                    generator = torch.Generator().manual_seed(torch_seed(Stream.LOW_RANK_START, SEED, width))
                    start = torch.randn(width, case.rank, generator=generator).double()
                    for _ in range(case.passes):
                        basis = torch.linalg.qr(expected @ start).Q
                        start = expected.mT @ basis
                    expected = basis @ (basis.mT @ expected)
                    kinds.append(key.removesuffix(".weight").split(".")[-1])
                error = float((found["approximate"][key] - expected).norm() / gradient.norm().clamp(min=1e-12))
                # The fp32 of the sketch, times the condition number of what an expert's few tokens leave.
                assert error < 5e-5, (name, key, error)
                # The ranks of a tensor-parallel group have different matrices; of others one counts.
                if i == 0 or (i < case.tensor and key not in found["replicas"]):
                    for kind in kinds:
                        kept[kind] += float(expected.square().sum())
                        total[kind] += float(gradient.double().square().sum())
        energy = {kind: kept[kind] / total[kind] for kind in total}
        for found in (of_rank[name] for of_rank in ranks):
            assert found["energy"] == pytest.approx(energy, rel=1e-5)
        assert case.rank == RANK or energy == pytest.approx({"total": 1.0}, abs=1e-6)
        # A second pass keeps more.
        if case.passes == 2:
            assert energy["total"] > ranks[0]["mixture, packed"]["energy"]["total"] + 0.01


def test_utilities_are_exact_along_the_factors(ranks) -> None:
    """Against forward mode of the plain model in fp64, along the product of the same factors."""
    for name, case in CASES.items():
        if name not in ranks[0]:
            continue
        model = case.plain_model().double()
        model.set_attn_implementation("eager")
        if case.mixture_of is not None:
            model.set_experts_implementation("eager")
        reference = Reference(model, torch.optim.SGD(model.parameters()))
        along = {key: tangent.double() for key, tangent in ranks[0][name]["along"].items()}
        expected = reference.utilities(tiny.rows(NUM_ROWS), along)
        found: dict[int, torch.Tensor] = {}
        for of_rank in ranks:
            found |= of_rank[name]["utilities"]
        assert sorted(found) == list(range(NUM_ROWS))
        scale = max(float(s.abs().max()) for s in expected)
        errors = [float((found[i] - s).abs().max()) / scale for i, s in enumerate(expected)]
        assert max(errors) < 2e-6, (name, errors)


def test_no_rank_departs_from_another(ranks) -> None:
    for name in ranks[0]:
        first = ranks[0][name]["along"]
        for of_rank in ranks[1:]:
            assert all(torch.equal(tangent, of_rank[name]["along"][key]) for key, tangent in first.items())


@pytest.mark.parametrize("kind", ["zeros", "one column", "ill-conditioned", "tiny"])
def test_a_basis_is_orthonormal_whatever_the_matrix(kind: str) -> None:
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
    # Nothing of the matrix lies outside.
    outside = sketch.double() - basis @ (basis.mT @ sketch.double())
    assert float(outside.norm(dim=(1, 2)).max()) <= 1e-5 * float(sketch.norm(dim=(1, 2)).max())
