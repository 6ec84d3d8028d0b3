"""Layers that ranks share: the estimate of a rank's memory against the tensors of a real engine."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_memory import SIZES, TRANSIENT_BOUND, make_recipe, measure, settings_of
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.soak import IS_SOAK
from vcore_ds.distributed import layout
from vcore_ds.models.architecture_check import count_parameters
from vcore_ds.models.configuration import read_model_shape
from vcore_ds.planning.memory import MemoryEstimate, ParameterCounts, estimate_memory, parameter_counts

pytestmark = pytest.mark.dist

TENSOR = 2
CASES = [  # precision, adapters, activation checkpoints
    ("bf16", False, True),
    ("bf16", True, True),
]
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


def estimate(folder: Path, case: tuple[str, bool, bool], **changed) -> MemoryEstimate:
    """Of one of the two groups of two ranks."""
    settings = replace(settings_of(*case), tensor=TENSOR, **changed)
    return estimate_memory(read_model_shape(str(folder)).take_tensor_shard(TENSOR), settings)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameters_are_those_of_a_part(measured, folder: Path, case) -> None:
    expected = parameter_counts(read_model_shape(str(folder)).take_tensor_shard(TENSOR), settings_of(*case).adapters)
    assert [result[CASES.index(case)][1] for result in measured] == [expected] * 4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_kept_is_estimated_within_two_percent(measured, folder: Path, case) -> None:
    expected = estimate(folder, case).persistent
    for result in measured:
        kept = result[CASES.index(case)][0]["vcore"]
        assert set(expected) == {kind for kind, num_bytes in kept.items() if num_bytes}
        for kind, num_bytes in expected.items():
            assert num_bytes == pytest.approx(kept[kind], rel=0.02), kind


@pytest.mark.parametrize("case", CASES, ids=str)
def test_peaks_are_estimated(measured, folder: Path, case) -> None:
    estimated = estimate(folder, case)
    expected = {phase: estimated.transient_bytes(phase) for phase in ("main", "utility", "step")}
    difference = estimate(folder, case, estimator="finite_difference")
    expected["finite_difference"] = difference.transient_bytes("utility")
    for result in measured:
        peaks = result[CASES.index(case)][0]
        for phase, num_bytes in expected.items():
            print(f"{case} {phase}: measured {peaks[phase]:,}, estimated {num_bytes:,}")
            assert num_bytes == pytest.approx(peaks[phase], rel=TRANSIENT_BOUND), phase
