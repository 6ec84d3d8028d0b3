"""Bytes predicted by `vcore-ds plan`, against a real engine on a small model of the same proportions."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.measured_bytes import measure_all
from tests.helpers.ranks import run_ranks
from tests.helpers.scaled_model import CASES, MOE_MODEL, NUM_RANKS, Case, make_recipe, scaled_shape, write_scaled_model
from vcore_ds.planning.batch_layout import summarize
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.fit import plan_memory
from vcore_ds.planning.hardware import GPUS, Cluster
from vcore_ds.planning.known_models import KNOWN_MODELS, QWEN3_32B, read_shape
from vcore_ds.planning.passes import StepPasses, parameter_counts
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.planning.step_cost import StepModel

pytestmark = pytest.mark.dist

BOUND = 0.10
"""Largest error that passes, relative to the measured bytes."""


@dataclass(frozen=True)
class Comparison:
    """A kind of bytes of one rank, in one case."""

    case: str
    kind: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to the measured bytes."""
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted > 0)


def compare(folder: Path, measured: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Every kind of bytes of every case. `measured`: of one rank, by case, as `measure_all` returns it."""
    return [one for case, case_bytes in zip(CASES, measured, strict=True) for one in _compare(case, folder, case_bytes)]


def _compare(case: Case, folder: Path, measured: Mapping[str, Any]) -> Iterator[Comparison]:
    shape = read_shape(str(folder / case.model))
    assert shape is not None
    settings = derive_plan_settings(make_recipe(case, folder))
    plan = plan_batch(settings, NUM_RANKS, shape, ranks_per_node=NUM_RANKS)
    config = deepspeed_config(settings, plan)
    lengths, probe_lengths = case.lengths, case.lengths[: len(case.lengths) // 2]
    main = lengths, plan.lay_out_main(range(len(lengths)), lengths)
    probe = probe_lengths, plan.lay_out_probe(range(len(probe_lengths)), probe_lengths)
    passes = {"main": summarize([main[1]]), "probe": summarize([probe[1]])}
    memory = plan_memory(settings, plan, config, passes, on_gpu=False)
    assert memory is not None
    kept = measured["kept"]
    for kind, num_bytes in memory.estimate.persistent.items():
        yield Comparison(case.name, kind, num_bytes, kept[kind])
    peaks = {phase: sum(kept.values()) + peak for phase, peak in measured["peaks"].items()}
    for phase in ("probe", "main"):
        predicted = memory.estimate.persistent_bytes + memory.estimate.transient_bytes(phase)
        yield Comparison(case.name, f"peak in {phase}", predicted, peaks[phase])
    yield Comparison(case.name, "peak", memory.estimate.peak_bytes, max(peaks.values()))
    # The speeds of the GPU play no part in bytes.
    cluster = Cluster(GPUS["H100"], NUM_RANKS, NUM_RANKS)
    counts = parameter_counts(shape, memory.settings.lora)
    model = StepModel(plan.time_model, counts, memory.settings, cluster)
    traffic = model.estimate_step(StepPasses.derive(memory.settings), [main], [probe]).traffic
    received, k = measured["received"], case.sequence_parallel
    all_gathers = traffic["parameters"]
    if case.rank is None:  # factors are not all-gathered
        all_gathers += traffic["tangents"]
    yield Comparison(case.name, "received in all-gathers", all_gathers.inside, received["gathers"])
    yield Comparison(case.name, "received in reductions", traffic["gradients"].inside, received["reductions"])
    if k > 1:  # a k-th of what is counted stays with the rank
        exchanges = received["exchanges"] * (k - 1) / k
        yield Comparison(case.name, "received in exchanges", traffic["sequence-parallel activations"].inside, exchanges)
    if case.expert > 1:  # half of what is counted stays with the rank
        tokens = traffic["expert-parallel tokens"].inside
        yield Comparison(case.name, "received in exchanges", tokens, received["exchanges"] / 2)


def average_over_ranks(measured: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The first rank's measurements, with the mean over ranks of received bytes, which differ since tokens go where the
    router sends them."""
    return [
        {**by_rank[0], "received": {
            kind: sum(one["received"][kind] for one in by_rank) / len(by_rank) for kind in by_rank[0]["received"]
        }}
        for by_rank in zip(*measured, strict=True)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    write_scaled_model(QWEN3_32B, folder)
    gc.collect()
    return folder


@pytest.fixture(scope="module")
def measured(folder: Path) -> list[list[dict[str, Any]]]:
    return run_ranks(measure_all, NUM_RANKS, str(folder))


def test_every_kind_of_bytes_is_predicted_within_ten_percent(folder: Path, measured) -> None:
    for rank_measurements in measured:
        comparisons = compare(folder, rank_measurements)
        print(*(f"{one.case:12} {one.kind:24} {one.error:+.1%}" for one in comparisons), sep="\n")
        assert [one for one in comparisons if abs(one.error) > BOUND] == []
        assert {one.case for one in comparisons} == {case.name for case in CASES}


def test_shards_reductions_and_exchanges_are_predicted_exactly(folder: Path, measured) -> None:
    """They are counted by formulas without estimates."""
    exact = {"moments", "master weights", "gradients", "received in reductions", "received in exchanges"}
    comparisons = [one for one in compare(folder, average_over_ranks(measured)) if one.kind in exact]
    assert len(comparisons) == len(CASES) * 4 + 2
    for one in comparisons:
        assert one.error == pytest.approx(0.0, abs=1e-3), one


def test_metrics_have_the_load_of_experts(measured) -> None:
    """Only for an MoE model, equal on all ranks and in this order; the ranks' load only under expert parallelism."""
    expert_names, rank_names = ([f"{name}_max", f"{name}_mean"] for name in ("expert_load", "expert_rank_load"))
    for case, *loads in zip(CASES, *([one["loads"] for one in by_case] for by_case in measured), strict=True):
        assert loads[0] == loads[1]
        names = expert_names * (case.model == MOE_MODEL) + rank_names * (case.expert > 1)
        assert list(loads[0]) == names
        for largest, mean in zip(names[::2], names[1::2], strict=True):
            assert 1 < loads[0][mean] <= loads[0][largest] < 4


@pytest.mark.parametrize("name", [name for name, shape in KNOWN_MODELS.items() if shape.experts is None])
def test_the_scaled_model_has_the_proportions_of_the_large_one(name: str) -> None:
    large, small = KNOWN_MODELS[name], scaled_shape(KNOWN_MODELS[name])
    assert small.num_heads % NUM_RANKS == 0 and small.num_heads % small.num_kv_heads == 0
    assert small.num_heads / small.num_kv_heads == large.num_heads / large.num_kv_heads
    assert small.intermediate_size / small.hidden_size == pytest.approx(
        large.intermediate_size / large.hidden_size, rel=0.05
    )
    width, large_width = small.num_heads * small.head_dim, large.num_heads * large.head_dim
    assert width / small.hidden_size == pytest.approx(large_width / large.hidden_size, rel=0.05)
    assert (small.is_tied, small.normalizes_heads) == (large.is_tied, large.normalizes_heads)
