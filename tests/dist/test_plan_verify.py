"""What `vcore-ds plan` says of bytes, against a real engine on a small model of the same proportions."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from vcore_ds.commands.plan import verify
from vcore_ds.commands.plan.scaled import CASES, NUM_RANKS, scaled_shape
from vcore_ds.commands.plan.verify import BOUND, Comparison, compare, describe_comparisons, launch, prepare
from vcore_ds.commands.plan.verify_rank import measure_all
from vcore_ds.errors import RunFailed
from vcore_ds.planning.known_models import KNOWN_MODELS
from vcore_ds.planning.model_shape import QWEN3_32B

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    prepare(QWEN3_32B, folder)
    gc.collect()
    return folder


@pytest.fixture(scope="module")
def measured(folder: Path) -> list[list[dict[str, Any]]]:
    return run_ranks(measure_all, NUM_RANKS, str(folder))


def test_every_kind_of_bytes_is_predicted_within_ten_percent(folder: Path, measured) -> None:
    for of_rank in measured:
        found = compare(folder, of_rank)
        print(describe_comparisons(found))
        assert [one for one in found if not one.holds] == []
        assert {one.case for one in found} == {case.name for case in CASES}


def test_what_is_counted_exactly(folder: Path, measured) -> None:
    """Shards by kind, reductions and exchanges have no estimate in them."""
    exact = {"moments", "master weights", "gradients", "received in reductions", "received in exchanges"}
    found = [one for one in compare(folder, measured[0]) if one.kind in exact]
    assert len(found) == len(CASES) * 4 + 1
    for one in found:
        assert one.error == pytest.approx(0.0, abs=1e-3), one


def test_a_wrong_prediction_is_seen(folder: Path, measured) -> None:
    more = [{**of_case, "received": {kind: 1.2 * value for kind, value in of_case["received"].items()}}
            for of_case in measured[0]]  # fmt: skip
    wrong = [one for one in compare(folder, more) if not one.holds]
    assert {one.kind for one in wrong} == {"received in gathers", "received in reductions", "received in exchanges"}
    assert f"over {BOUND:.0%}" in describe_comparisons(wrong)
    one = Comparison("full", "peak", 109.9, 100.0)
    assert one.holds and not replace(one, predicted=110.1).holds and not replace(one, predicted=89.9).holds


def test_ranks_that_fail_say_why(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="--verify: the ranks ended with"):
        launch(tmp_path)


def test_ranks_that_do_not_end_are_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "TIMEOUT_SECONDS", 0.0)
    with pytest.raises(RunFailed, match="--verify: the ranks have not ended after 0 s"):
        launch(tmp_path)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_the_small_model_has_the_large_ones_proportions(name: str) -> None:
    large, small = KNOWN_MODELS[name], scaled_shape(KNOWN_MODELS[name])
    assert small.num_heads % NUM_RANKS == 0 and small.num_heads % small.num_kv_heads == 0
    assert small.num_heads / small.num_kv_heads == large.num_heads / large.num_kv_heads
    assert small.intermediate_size / small.hidden_size == pytest.approx(
        large.intermediate_size / large.hidden_size, rel=0.05
    )
    heads, of_large = small.num_heads * small.head_dim, large.num_heads * large.head_dim
    assert heads / small.hidden_size == pytest.approx(of_large / large.hidden_size, rel=0.05)
    assert (small.is_tied, small.normalizes_heads) == (large.is_tied, large.normalizes_heads)
