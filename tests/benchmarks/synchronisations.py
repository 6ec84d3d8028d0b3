"""Host-device synchronisations that one step would need on a GPU, by method and number of layers, on two CPU ranks.

    python -m tests.benchmarks.synchronisations

`tests/dist/test_synchronisations.py` asserts that the numbers do not grow with the number of layers.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tests.helpers.ranks import run_ranks
from tests.helpers.step_cases import CASES, steps
from tests.helpers.streams import accelerator_with_streams
from tests.helpers.synchronisations import Synchronisations

NUM_LAYERS = (2, 4)


class Counted(NamedTuple):
    """Counts of the third step. In the first two, DeepSpeed compares its order of parameters between ranks."""

    counts: dict[str, int]
    """Synchronisations by kind."""
    brakes: int
    """Upper bound of the synchronisations with which DeepSpeed limits its memory."""
    num_parameters: int


def count(case: str, num_layers: int, overlap: bool) -> Counted:
    """`overlap`: DeepSpeed's `overlap_comm`."""
    with accelerator_with_streams() as accelerator, steps(case, num_layers=num_layers, overlap=overlap) as run:
        for _ in range(2):
            run.take()
        with Synchronisations(accelerator) as synchronisations:
            run.take()
        return Counted(dict(synchronisations.counts), sum(synchronisations.brakes.values()), len(run.engine.trainable))


def count_all(overlap: bool, cases: Iterable[str]) -> dict[str, list[Counted]]:
    return {case: [count(case, num_layers, overlap) for num_layers in NUM_LAYERS] for case in cases}


def main() -> None:
    print(f"{'':<54}" + "".join(f"{num_layers:>5} layers" for num_layers in NUM_LAYERS))
    for case, counts in run_ranks(count_all, 2, True, list(CASES))[0].items():
        print(f"{case:<54}" + "".join(f"{sum(counted.counts.values()):>12}" for counted in counts))
        for kind in sorted({kind for counted in counts for kind in counted.counts}):
            print(f"    {kind:<50}" + "".join(f"{counted.counts.get(kind, 0):>12}" for counted in counts))
        print(f"    {'(DeepSpeed limiting its memory, at most)':<50}" + "".join(f"{c.brakes:>12}" for c in counts))
        print(f"    {'(parameters)':<50}" + "".join(f"{c.num_parameters:>12}" for c in counts))


if __name__ == "__main__":
    main()
