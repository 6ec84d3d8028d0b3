"""Host-device synchronisations of a step, which must not depend on the number of parameters."""

from typing import NamedTuple

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.soak import IS_SOAK
from tests.helpers.step_cases import TESTED, steps
from tests.helpers.streams import accelerator_with_streams
from tests.helpers.synchronisations import Synchronisations

pytestmark = pytest.mark.dist


class Counted(NamedTuple):
    """Synchronisations by kind in the third step: in the first two, DeepSpeed compares its order of parameters."""

    counts: dict[str, int]
    num_parameters: int


def count(case: str, num_layers: int, overlap: bool) -> Counted:
    """`overlap`: DeepSpeed's `overlap_comm`."""
    with accelerator_with_streams() as accelerator, steps(case, num_layers=num_layers, overlap=overlap) as run:
        for _ in range(2):
            run.take()
        with Synchronisations(accelerator) as synchronisations:
            run.take()
        return Counted(dict(synchronisations.counts), len(run.engine.trainable))


def count_all(overlap: bool) -> dict[str, list[Counted]]:
    return {case: [count(case, num_layers, overlap) for num_layers in (2, 4)] for case in TESTED}


@pytest.fixture(
    scope="module",
    params=[True, False] if IS_SOAK else [True],
    ids=lambda overlap: "overlap" if overlap else "one stream",
)
def counted(request: pytest.FixtureRequest) -> list[dict[str, list[Counted]]]:
    return run_ranks(count_all, 2, request.param)


@pytest.mark.parametrize("case", TESTED)
def test_more_layers_need_no_more_synchronisations(counted, case: str) -> None:
    for result in counted:
        few, many = result[case]
        assert many.num_parameters - few.num_parameters == 2 * (14 if "LoRA" in case else 11)
        assert sum(few.counts.values()) > 0
        assert few.counts == many.counts


@pytest.mark.parametrize("case", TESTED)
def test_the_package_waits_for_no_stream(counted, case: str) -> None:
    """The package only reads numbers; DeepSpeed waits for a stream once per backward and step."""
    for result in counted:
        waits = {kind for kind in result[case][0].counts if "." in kind}
        assert waits == {"stage3.independent_gradient_partition_epilogue"}
