"""Sharded layers: the estimate of a rank's memory against the tensors of a real engine."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_memory import SIZES, assert_peaks, assert_persistent_bytes, make_recipe, make_settings, measure
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.soak import IS_SOAK
from vcore_ds.distributed import layout
from vcore_ds.models.architecture_check import count_parameters
from vcore_ds.models.description import read_model
from vcore_ds.planning.memory import MemoryEstimate, estimate_memory
from vcore_ds.planning.passes import ParameterCounts, parameter_counts

pytestmark = pytest.mark.dist

TENSOR = 2
CASES = [("bf16", False, True)]  # precision, adapters, activation checkpoints
if IS_SOAK:
    CASES.append(("bf16", False, False))


def measure_all(folder: str) -> list[tuple[dict[str, Any], ParameterCounts]]:
    layout.arrange(tensor=TENSOR)
    recipes = [make_recipe(folder, *case, tensor=TENSOR) for case in CASES]
    return [(measure(recipe), count_parameters(recipe.model.path, recipe.lora, TENSOR)) for recipe in recipes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("memory") / "model"
    tiny.qwen3(**SIZES).save_pretrained(path)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def measured(folder: Path) -> list[list[tuple[dict[str, Any], ParameterCounts]]]:
    return run_ranks(measure_all, 4, str(folder))


def estimate_group(folder: Path, case: tuple[str, bool, bool], **changes) -> MemoryEstimate:
    """Estimate a rank's memory in two tensor-parallel groups of two ranks."""
    settings = replace(make_settings(*case), tensor=TENSOR, **changes)
    return estimate_memory(read_model(str(folder)).shape.take_tensor_shard(TENSOR), settings)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_has_the_parameters_of_its_shards_of_the_layers(measured, folder: Path, case) -> None:
    shape = read_model(str(folder)).shape.take_tensor_shard(TENSOR)
    expected = parameter_counts(shape, make_settings(*case).adapters)
    assert [result[CASES.index(case)][1] for result in measured] == [expected] * 4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_persistent_bytes_are_estimated_within_two_percent(measured, folder: Path, case) -> None:
    for result in measured:
        assert_persistent_bytes(estimate_group(folder, case).persistent, result[CASES.index(case)][0]["vcore"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_peaks_are_estimated_within_twenty_percent(measured, folder: Path, case) -> None:
    estimate, difference = estimate_group(folder, case), estimate_group(folder, case, estimator="finite_difference")
    for result in measured:
        assert_peaks(estimate, difference, result[CASES.index(case)][0])
