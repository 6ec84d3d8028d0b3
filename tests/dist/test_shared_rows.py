"""Whole runs on rows that ranks share: the same sequences and losses as on one rank, also resumed at another degree."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import resumed_runs, tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.resumed_runs import NUM_STEPS
from tests.helpers.setups import sums, write_conversations
from tests.helpers.token_records import assert_same_records
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.config import Recipe
from vcore_ds.distributed import layout
from vcore_ds.track.token_gather import gather_record
from vcore_ds.track.token_records import SequenceTokens

pytestmark = pytest.mark.dist

DEGREES = [(1, 1), (2, 4), (4, 2), ("auto", "auto")]
"""Ranks that share a row of the main batch and of the probe batch, on 4 ranks."""


def recipe(folder: Path, name: str, degrees: tuple[Any, Any], row_tokens: int = 128) -> Recipe:
    """A run in `folder / name`, with fewer probe sequences than ranks, and validation every other step."""
    return Recipe(
        method={"kl_budget": 0.05},
        probe={"batch_size": 3, "every": 2, "direction": "adam", "sequence_parallel": degrees[1]},
        batch={"global_size": 6, "packed_row_tokens": row_tokens, "sequence_parallel": degrees[0]},
        model={"path": str(folder / "model"), "precision": "fp32"},
        data={
            "train_path": str(folder / "train.jsonl"),
            "validation_path": str(folder / "validation.jsonl"),
            "cache_dir": str(folder / "cache"),
            "cutoff_length": 128,
        },
        optimizer={"learning_rate": 1e-3},
        schedule={"num_steps": NUM_STEPS},
        run={"output_dir": str(folder / name), "validate_every": 2},
        engine={"deepspeed_config": str(folder / "fp32.json")},
    )


def chosen_sequences(degree: int) -> list[list[tuple[int, int]]]:
    """Id and number of tokens of each sequence in records of at most 30 of 70 tokens, on this rank."""
    group, num_groups = layout.rank("data", degree), layout.size("data", degree)
    own = []
    for i in [*range(10), 4, 9][group::num_groups]:  # two of them twice
        n = 1 + i
        numbers, places = np.zeros(n, dtype=np.float32), np.arange(n, dtype=np.int32)
        own.append(SequenceTokens(i, 0.1, 0.1, 1.0, places, places, numbers, None, numbers))
    found = []
    for step in range(5):
        record = gather_record(step, own, degree, None, seed=3, most_tokens=30)
        assert (record.num_sequences_global, record.num_supervised_tokens_global) == (12, 70)
        found.append([(sequence.sequence_id, len(sequence)) for sequence in record.sequences])
    return found


def alone(folder: Path) -> list:
    resumed_runs.to_the_end(recipe(folder, "alone", ("auto", "auto")))
    return [chosen_sequences(1)]


def on_two_ranks(folder: Path) -> list:
    resumed_runs.until(recipe(folder, "resumed", (2, 2)), 3)
    return [chosen_sequences(degree) for degree in (1, 2)]


def on_four_ranks(folder: Path) -> list:
    for main, probe in DEGREES:
        resumed_runs.to_the_end(recipe(folder, f"{main}_{probe}", (main, probe)))
    # A row of a rank holds a quarter of the longest sequence.
    resumed_runs.to_the_end(recipe(folder, "short_rows", ("auto", "auto"), row_tokens=32))
    resumed_runs.to_the_end(recipe(folder, "resumed", (4, 4)))
    return [chosen_sequences(degree) for degree in (1, 2, 4)]


@dataclass(frozen=True)
class Found:
    folder: Path
    chosen: list
    """What `chosen_sequences` gave, at any number of ranks and degree, on each rank."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("shared_rows")
    tokenizer = make_tokenizer()
    tiny.qwen3(vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_conversations(folder / "train.jsonl", sums(range(12)))
    write_conversations(folder / "validation.jsonl", sums(range(20, 27)))
    config = tiny.deepspeed_config(persistence_threshold=500)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        del config[key]  # the recipe's
    (folder / "fp32.json").write_text(json.dumps(config))
    chosen = []
    for function, num_ranks in ((alone, 1), (on_two_ranks, 2), (on_four_ranks, 4)):
        chosen += [one for of_rank in run_ranks(function, num_ranks, folder) for one in of_rank]
    return Found(folder, chosen)


@pytest.fixture(scope="module")
def folder(found: Found) -> Path:
    return found.folder


@pytest.mark.parametrize("name", [*(f"{main}_{probe}" for main, probe in DEGREES), "short_rows", "resumed"])
def test_a_run_is_the_same_on_shared_rows(folder: Path, name: str) -> None:
    expected, found = (resumed_runs.timeless_metrics(folder / run) for run in ("alone", name))
    assert len(found) == NUM_STEPS
    for key in ("loss", "weighted_loss", "grad_norm", "direction_norm", "effective_sample_size"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-5), key
    for key in ("probe_loss", "validation_loss"):  # of every other step
        here, there = ([line[key] for line in lines if line.get(key) is not None] for lines in (found, expected))
        assert here == pytest.approx(there, rel=1e-5) and len(here) >= 3, key
    for key in ("sequences", "supervised_tokens"):
        assert [line[key] for line in found] == [line[key] for line in expected]
    tensors = resumed_runs.tensors_of(folder / "alone")
    for tensor, values in resumed_runs.tensors_of(folder / name).items():
        # A few updates of 1e-3, whose rounding Adam magnifies where a gradient is about as small as its eps.
        assert values.allclose(tensors[tensor], rtol=1e-4, atol=1e-5), tensor


@pytest.mark.parametrize("name", [*(f"{main}_{probe}" for main, probe in DEGREES), "short_rows", "resumed"])
def test_the_records_of_tokens_are_the_same_on_shared_rows(folder: Path, name: str) -> None:
    assert assert_same_records(folder / name, folder / "alone", num_sequences=6) == [*range(1, NUM_STEPS + 1)]


def test_a_record_of_a_large_batch_holds_the_same_sequences_at_any_number_of_ranks(found: Found) -> None:
    assert len(found.chosen) == 1 + 2 * 2 + 4 * 3
    assert all(chosen == found.chosen[0] for chosen in found.chosen)
    sizes = [sum(n for _, n in of_step) for of_step in found.chosen[0]]
    assert all(20 <= size <= 30 for size in sizes)  # the next one did not fit
    assert len({tuple(of_step) for of_step in found.chosen[0]}) == 5  # others in each step


def test_the_metrics_say_how_many_ranks_share_a_row(folder: Path) -> None:
    def degrees(name: str) -> list[tuple[Any, Any]]:
        lines = resumed_runs.timeless_metrics(folder / name)
        return [(line["sequence_parallel"], line["probe_sequence_parallel"]) for line in lines]

    assert degrees("2_4") == [(2, 4 if k % 2 == 0 else None) for k in range(NUM_STEPS)]
    assert degrees("resumed") == [
        (d, d if k % 2 == 0 else None) for k in range(NUM_STEPS) for d in (2 if k < 3 else 4,)
    ]
    assert all(main == 4 for main, _ in degrees("short_rows"))  # no shorter row holds the longest sequence
