"""Gathers and reductions on streams of their own (`overlap_comm`), on an accelerator whose streams are written down.

`tests/gpu/test_overlap.py` runs the same steps on a GPU, under PyTorch's own detector of races.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.soak import IS_SOAK
from tests.helpers.step_cases import TESTED, steps
from tests.helpers.streams import Races, accelerator_with_streams
from vcore_ds.engine.flat_shards import Streams

pytestmark = pytest.mark.dist


@dataclass
class Recorded:
    races: list[str]
    num_accesses: Counter[tuple[str, bool]]
    """By what was read or written, and whether that was beside the default stream."""


def record(overlap: bool, without: tuple[str, ...] = (), cases: Iterable[str] = tuple(TESTED)) -> dict[str, Recorded]:
    """Two steps of each case. `without`: waits of the engine that are left out."""
    for name in without:
        setattr(Streams, name, lambda streams: None)
    found = {}
    for case in cases:
        with accelerator_with_streams() as accelerator, steps(case, num_layers=2, overlap=overlap) as run:
            shards, direction = run.engine.shards, run.estimator.direction
            watched = {
                "parameters": shards.parameters(),
                "masters": shards.masters(),
                "gradients": shards.gradients(),
                "direction": [] if direction is None else direction.buffers,
            }
            with Races(accelerator, watched) as races:
                for _ in range(2):
                    run.take()
            found[case] = Recorded(races.races, races.num_accesses)
    return found


@pytest.fixture(
    scope="module",
    params=[True, False] if IS_SOAK else [True],
    ids=lambda overlap: "overlap" if overlap else "one stream",
)
def recorded(request: pytest.FixtureRequest) -> tuple[bool, list[dict[str, Recorded]]]:
    return request.param, run_ranks(record, 2, request.param)


@pytest.mark.parametrize("case", TESTED)
def test_what_is_written_is_ordered_before_what_reads_it(recorded, case: str) -> None:
    overlap, every_rank = recorded
    for of_rank in every_rank:
        found = of_rank[case]
        assert found.races == []
        for name in ("parameters", "gradients"):
            assert found.num_accesses[name, False] > 0
            assert (found.num_accesses[name, True] > 0) == overlap


def test_without_the_engines_waits_gathers_race_with_changes_of_shards() -> None:
    """The race of DeepSpeed issue 5545 is found, so it says something that there is none."""
    cases = ("sft", "vcore, jvp, LoRA", "vcore, finite difference")
    for of_rank in run_ranks(record, 2, True, ("let_gathers_wait",), cases):
        for case, found in of_rank.items():
            writers = {race.split(" at ")[1].split(":")[0] for race in found.races}
            print(case, writers)
            assert "stage3._reassign_or_swap_out_partitioned_parameters" in writers
            assert ("finite_difference.perturb_parameters" in writers) == ("finite difference" in case)
