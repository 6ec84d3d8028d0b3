"""Low-rank directions on 1, 2 and 4 ranks: factors found on shards against those of the whole matrices, and utilities
along them against plain PyTorch in fp64 along the same matrices."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.helpers import step_runs, tiny
from tests.helpers.oracle import Reference
from tests.helpers.ranks import run_ranks
from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.distributed import layout
from vcore_ds.engine.flat_shards import is_expert_block
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
    mixture_of: str | None = None
    sequence_parallel: int = 1

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
}


def measure(case: Case) -> dict[str, Any]:
    recipe = step_runs.recipe(probe={"rank": case.rank}, utility={"fused": case.fused})
    options = dict(checkpointing=case.checkpointing, tied=case.tied, mixture_of=case.mixture_of)
    engine = step_runs.make_engine(tiny.token_loss_model(**options), recipe)
    estimator = build_estimator(derive_step_settings(recipe), engine)
    direction = estimator.direction
    probe = step_runs.deal(tiny.rows(2, seed=9), 1)
    taken = take_direction(direction, derive_step_settings(recipe), probe, seed=SEED)
    batches = step_runs.deal(tiny.rows(NUM_ROWS), 2, case.sequence_parallel, packed=case.packed)
    utilities: dict[int, torch.Tensor] = {}
    forward = estimator.begin(batches)
    with engine.accumulation(len(batches)):
        for k, batch in enumerate(batches):
            losses, values = forward(k)
            sizes = batch.num_supervised_tokens().tolist()
            utilities |= dict(zip(batch.sequence_ids, values.split(sizes), strict=False))
            engine.backward(losses.sum())
    whole, approximate = {}, {}
    for group in range(len(direction.groups)):
        gathered = direction.finish_gather(direction.start_gather(group))
        for name, parameter in engine.trainable:
            if id(parameter) in gathered:
                tangent = direction.low_rank_tangents()[id(parameter)]
                key = name.removeprefix("causal_lm.")
                whole[key] = gathered[id(parameter)].clone()
                approximate[key] = tangent.matrix() if isinstance(tangent, LowRank) else tangent.clone()
                assert isinstance(tangent, LowRank) == has_low_rank(parameter, case.rank)
                assert not is_expert_block(parameter)
    # The same state gives the same factors again, to the last bit: what a resumed run does.
    resumed = Direction(engine, case.rank)
    for mine, theirs in zip(resumed.buffers, direction.buffers, strict=True):
        mine.copy_(theirs)
    resumed.load_state(direction.state())
    again = resumed.low_rank_tangents()
    for parameter, tangent in direction.low_rank_tangents().items():
        both = (x if isinstance(x, LowRank) else (x,) for x in (tangent, again[parameter]))
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    engine.close()
    return {"utilities": utilities, "whole": whole, "approximate": approximate, "energy": taken.energy}


def measure_all() -> dict[str, dict[str, Any]]:
    num_ranks = layout.size("shards")
    layout.make_sequence_groups([1, 2] if num_ranks > 1 else [1])
    return {name: measure(case) for name, case in CASES.items() if case.sequence_parallel <= num_ranks}


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(measure_all, request.param)


def test_factors_are_the_projection_of_the_whole_matrices(ranks) -> None:
    for name, case in CASES.items():
        for found in (of_rank[name] for of_rank in ranks if name in of_rank):
            kept = total = 0.0
            for key, gradient in found["whole"].items():
                expected = gradient.double()
                if gradient.ndim >= 2 and min(gradient.shape[-2:]) > case.rank:
                    width = gradient.shape[-1]
                    generator = torch.Generator().manual_seed(torch_seed(Stream.LOW_RANK_START, SEED, width))
                    basis = torch.linalg.qr(expected @ torch.randn(width, case.rank, generator=generator).double()).Q
                    expected = basis @ (basis.mT @ expected)
                error = float((found["approximate"][key] - expected).norm() / gradient.norm().clamp(min=1e-12))
                # The fp32 of the sketch, times the condition number of what an expert's few tokens leave.
                assert error < 5e-5, (name, key, error)
                kept += float(expected.square().sum())
                total += float(gradient.double().square().sum())
            assert found["energy"] == pytest.approx(kept / total, rel=1e-5)
            assert case.rank == RANK or found["energy"] == pytest.approx(1.0, abs=1e-6)


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
        along = {key: tangent.double() for key, tangent in ranks[0][name]["approximate"].items()}
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
        first = ranks[0][name]["approximate"]
        for of_rank in ranks[1:]:
            assert all(torch.equal(tangent, of_rank[name]["approximate"][key]) for key, tangent in first.items())


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
