"""All-gathers and reductions on separate streams (`overlap_comm`), on an accelerator that records its streams.

`tests/gpu/test_overlap.py` runs the same steps on a GPU, under PyTorch's race detector.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.step_cases import TESTED, steps
from tests.helpers.streams import Races, accelerator_with_streams
from vcore_ds.engine.flat_shards import Streams

pytestmark = pytest.mark.dist


@dataclass
class Recorded:
    races: list[str]
    num_accesses: Counter[tuple[str, bool]]
    """By tensor, and whether the access was on another stream than the default one."""


def record(without: tuple[str, ...] = (), cases: Iterable[str] = tuple(TESTED)) -> dict[str, Recorded]:
    """Take two steps of each case. `without`: names of the engine's waits that are left out."""
    for name in without:
        setattr(Streams, name, lambda streams: None)
    recordings = {}
    for case in cases:
        with accelerator_with_streams() as accelerator, steps(case, num_layers=2, overlap=True) as run:
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
            recordings[case] = Recorded(races.races, races.num_accesses)
    return recordings


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Recorded]]:
    return run_ranks(record, 2)


@pytest.mark.parametrize("case", TESTED)
def test_steps_have_no_races(recorded, case: str) -> None:
    for rank_recordings in recorded:
        recording = rank_recordings[case]
        assert recording.races == []
        for name in ("parameters", "gradients"):
            assert recording.num_accesses[name, False] > 0 < recording.num_accesses[name, True]


def test_without_the_engines_waits_all_gathers_race_with_changes_of_shards() -> None:
    """The race of DeepSpeed issue 5545 is found, so the test above can fail."""
    cases = ("sft", "vcore, jvp, LoRA", "vcore, finite difference")
    for rank_recordings in run_ranks(record, 2, ("let_gathers_wait",), cases):
        for case, recording in rank_recordings.items():
            writers = {race.split(" at ")[1].split(":")[0] for race in recording.races}
            print(case, writers)
            assert "stage3._reassign_or_swap_out_partitioned_parameters" in writers
            assert ("estimators.perturb_parameters" in writers) == ("finite difference" in case)
