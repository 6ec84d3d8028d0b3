"""A step's synchronisations with the device do not depend on the number of parameters."""

import pytest

from tests.benchmarks.synchronisations import METHODS, count
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

NUM_LAYERS = (2, 6)


def count_all() -> dict[str, list[tuple[dict[str, int], int]]]:
    return {name: [count(sections, layers) for layers in NUM_LAYERS] for name, sections in METHODS.items()}


@pytest.fixture(scope="module")
def counted() -> list[dict[str, list[tuple[dict[str, int], int]]]]:
    return run_ranks(count_all, 2)


@pytest.mark.parametrize("method", METHODS)
def test_more_layers_take_no_more_synchronisations(counted, method: str) -> None:
    for of_rank in counted:
        (few, num_parameters_few), (many, num_parameters_many) = of_rank[method]
        assert (num_parameters_few, num_parameters_many) == (25, 69)
        assert sum(few.values()) > 0
        assert few == many
