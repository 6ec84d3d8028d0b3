"""Complete runs with sequence parallelism: the sequences and losses of one rank, also resumed at another
sequence-parallel size."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed.distributed_c10d as c10d

from tests.helpers import resumed_runs, tiny
from tests.helpers.collectives import list_collectives
from tests.helpers.ranks import run_ranks
from tests.helpers.resumed_runs import NUM_STEPS
from tests.helpers.setups import sums, write_conversations, write_deepspeed_config
from tests.helpers.token_records import assert_same_records
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.config.schema import Recipe
from vcore_ds.distributed import layout
from vcore_ds.training import console, run, step_metrics
from vcore_ds.training.followed import gather_followed
from vcore_ds.training.step_metrics import gather_record, write_or_warn
from vcore_ds.training.token_records import SequenceTokens, read_records

pytestmark = pytest.mark.dist

FOLLOWING = ("alone", "2_4", "resumed")
"""Runs with followed traces: on one rank, and with packs shared by two ranks, also by four after resuming."""
SEQUENCE_PARALLEL_SIZES = [(2, 4), ("auto", "auto")]
"""Of the main batch and of the probe batch, on 4 ranks."""
STOP = 1
"""Step 2 takes the direction of step 1, step 3 probes."""


def make_recipe(folder: Path, name: str, sizes: tuple[Any, Any], pack_tokens: int = 128) -> Recipe:
    """Make the recipe of a run in `folder / name`, with fewer probe sequences than ranks, and validation every other
    step."""
    return Recipe(
        method={"kl_budget": 0.05},
        probe={"batch_size": 3, "every": 2, "direction": "adam", "sequence_parallel": sizes[1]},
        batch={"global_size": 6, "pack_tokens_per_rank": pack_tokens, "sequence_parallel": sizes[0]},
        model={"path": str(folder / "model"), "precision": "fp32"},
        data={
            "train_path": str(folder / "train.jsonl"),
            "validation_path": str(folder / "validation.jsonl"),
            "cache_dir": str(folder / "cache"),
            "cutoff_length": 128,
        },
        optimizer={"learning_rate": 1e-3},
        schedule={"num_steps": NUM_STEPS},
        run={
            "output_dir": str(folder / name),
            "validate_every": 2,
            "num_followed_traces": 5 if name in FOLLOWING else 0,
        },
        engine={"deepspeed_config": str(folder / "fp32.json")},
    )


@dataclass(frozen=True)
class RankResult:
    chosen: list[list[list[tuple[int, int]]]]
    """Results of `choose_sequences`, for each sequence-parallel size."""
    lines: list[str]
    """Printed by `fail_to_write_records`."""
    unconnected: set[str] = field(default_factory=set)
    """Communicators that a run uses, but not before it compares free memory."""
    num_new_groups: int = 0
    """Process groups that another run in the same process makes."""


def make_sequence(i: int, num_tokens: int) -> SequenceTokens:
    numbers, places = np.zeros(num_tokens, dtype=np.float32), np.arange(num_tokens, dtype=np.int32)
    return SequenceTokens(i, 0.1, 0.1, 1.0, positions=places, token_ids=places, losses=numbers, weights=numbers)


def choose_sequences(size: int) -> list[list[tuple[int, int]]]:
    """Gather records of at most 30 of 70 tokens; returns ids and numbers of tokens of their sequences."""
    group, num_groups = layout.rank("data", size), layout.size("data", size)
    sequences = [make_sequence(i, 1 + i) for i in [*range(10), 4, 9][group::num_groups]]  # two of them twice
    steps = []
    for step in range(5):
        with patch.object(step_metrics, "MOST_TOKENS", 30):
            record = gather_record(step, sequences, size, None, seed=3)
        assert (record.num_sequences_global, record.num_supervised_tokens_global) == (12, 70)
        steps.append([(sequence.sequence_id, len(sequence)) for sequence in record.sequences])
    return steps


def fail_to_write_records(folder: Path) -> list[str]:
    """Write records to a path that is a file; returns the lines that this rank prints. No rank raises an error."""
    lines: list[str] = []
    sequences = [make_sequence(layout.rank("shards"), 3)]
    a_file = folder / "train.jsonl"
    followed = gather_followed(5, {layout.rank("shards"): sequences[0]}, layout.size("shards"))
    with patch.object(console, "say", lines.append):
        write_or_warn(a_file, gather_record(5, sequences, 1, None, seed=3), "step")
        write_or_warn(a_file, followed, "followed")
    return lines


def run_on_one_rank(folder: Path) -> RankResult:
    resumed_runs.run_to_end(make_recipe(folder, "alone", ("auto", "auto")))
    return RankResult([choose_sequences(1)], fail_to_write_records(folder))


def run_on_two_ranks(folder: Path) -> RankResult:
    resumed_runs.run_until(make_recipe(folder, "resumed", (2, 2)), STOP)
    return RankResult([choose_sequences(size) for size in (1, 2)], fail_to_write_records(folder))


def list_communicators() -> set[str]:
    return {collective.communicator for collective in list_collectives()}


def run_on_four_ranks(folder: Path) -> RankResult:
    connected: set[str] = set()
    with patch.object(run, "check_memory", side_effect=lambda *_: connected.update(list_communicators())):
        resumed_runs.run_to_end(make_recipe(folder, "2_4", (2, 4)))
    groups = {layout.group("sequence", size).group_name for size in (2, 4)}
    assert groups <= list_communicators()
    num_groups = c10d._world.group_count
    resumed_runs.run_to_end(make_recipe(folder, "auto_auto", ("auto", "auto")))
    num_new_groups = c10d._world.group_count - num_groups
    # A pack of a rank holds a quarter of the longest sequence.
    resumed_runs.run_to_end(make_recipe(folder, "short_packs", ("auto", "auto"), pack_tokens=32))
    resumed_runs.run_to_end(make_recipe(folder, "resumed", (4, 4)))
    chosen, lines = [choose_sequences(size) for size in (1, 2, 4)], fail_to_write_records(folder)
    return RankResult(chosen, lines, groups - connected, num_new_groups)


@dataclass(frozen=True)
class Results:
    folder: Path
    ranks: list[list[RankResult]]
    """By rank, on 1, 2 and 4 ranks."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("shared_packs")
    tokenizer = make_tokenizer()
    tiny.qwen3(vocab_size=len(tokenizer), num_hidden_layers=1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_conversations(folder / "train.jsonl", sums(range(12)))
    write_conversations(folder / "validation.jsonl", sums(range(20, 27)))
    write_deepspeed_config(folder / "fp32.json")
    functions = ((run_on_one_rank, 1), (run_on_two_ranks, 2), (run_on_four_ranks, 4))
    return Results(folder, [run_ranks(function, num_ranks, folder) for function, num_ranks in functions])


@pytest.fixture(scope="module")
def folder(results: Results) -> Path:
    return results.folder


def test_groups_are_connected_before_memory_is_compared_and_kept(results: Results) -> None:
    for result in results.ranks[2]:
        assert result.unconnected == set() and result.num_new_groups == 0


@pytest.mark.parametrize(
    "name", [*(f"{main}_{probe}" for main, probe in SEQUENCE_PARALLEL_SIZES), "short_packs", "resumed"]
)
def test_a_run_on_shared_packs_has_the_metrics_and_parameters_of_one_rank(folder: Path, name: str) -> None:
    expected, metrics = (resumed_runs.read_deterministic_metrics(folder / run) for run in ("alone", name))
    assert len(metrics) == NUM_STEPS
    for key in ("loss", "weighted_loss", "grad_norm", "direction_norm", "effective_sample_size"):
        assert [line[key] for line in metrics] == pytest.approx([line[key] for line in expected], rel=1e-5), key
    for key, num_lines in (("probe_loss", 2), ("validation_loss", 2)):  # of every other step
        here, there = ([line[key] for line in lines if line.get(key) is not None] for lines in (metrics, expected))
        assert here == pytest.approx(there, rel=1e-5) and len(here) == num_lines, key
    for key in ("sequences", "supervised_tokens"):
        assert [line[key] for line in metrics] == [line[key] for line in expected]
    tensors = resumed_runs.load_checkpoint_tensors(folder / "alone")
    for tensor, values in resumed_runs.load_checkpoint_tensors(folder / name).items():
        # A few updates of 1e-3, whose rounding Adam magnifies where a gradient is about as small as its eps.
        assert values.allclose(tensors[tensor], rtol=1e-4, atol=1e-5), tensor


@pytest.mark.parametrize(
    "name", [*(f"{main}_{probe}" for main, probe in SEQUENCE_PARALLEL_SIZES), "short_packs", "resumed"]
)
def test_token_records_on_shared_packs_equal_those_of_one_rank(folder: Path, name: str) -> None:
    assert assert_same_records(folder / name, folder / "alone", num_sequences=6) == [*range(1, NUM_STEPS + 1)]


@pytest.mark.parametrize("name", FOLLOWING[1:])
def test_followed_traces_on_shared_packs_equal_those_of_one_rank(folder: Path, name: str) -> None:
    assert assert_same_records(folder / name, folder / "alone", "followed", num_sequences=5) == [
        *range(1, NUM_STEPS + 1)
    ]


def test_the_same_traces_are_followed_at_every_step_two_of_five_held_out(folder: Path) -> None:
    traces = [record.sequences for record in read_records(folder / "alone", "followed")]
    origins = [[(trace.source, trace.sequence_id) for trace in of_step] for of_step in traces]
    assert all(of_step == origins[0] for of_step in origins)
    assert [trace.is_held_out for trace in traces[0]] == [True, True, False, False, False]
    first, last = (np.concatenate([trace.losses for trace in traces[step][2:]]) for step in (0, -1))
    assert last.mean() < first.mean()  # training data, which the run learns


def test_a_record_of_a_large_batch_has_the_same_sequences_at_every_world_size(results: Results) -> None:
    every = [chosen for rank_results in results.ranks for result in rank_results for chosen in result.chosen]
    assert len(every) == 1 + 2 * 2 + 4 * 3
    assert all(chosen == every[0] for chosen in every)
    sizes = [sum(n for _, n in step) for step in every[0]]
    assert all(20 <= size <= 30 for size in sizes)  # the next one did not fit
    assert len({tuple(step) for step in every[0]}) == 5  # others in each step


def test_only_the_first_rank_warns_of_a_record_that_cannot_be_written(results: Results) -> None:
    for first, *others in results.ranks:
        assert len(first.lines) == 2
        for line, name in zip(first.lines, ("step_00000005.npz", "followed_00000005.npz"), strict=True):
            assert line.startswith("warning: ") and name in line
        assert all(result.lines == [] for result in others)


def test_metrics_have_the_sequence_parallel_sizes(folder: Path) -> None:
    def read_sizes(name: str) -> list[tuple[Any, Any]]:
        lines = resumed_runs.read_deterministic_metrics(folder / name)
        return [(line["sequence_parallel"], line["probe_sequence_parallel"]) for line in lines]

    assert read_sizes("2_4") == [(2, 4 if k % 2 == 0 else None) for k in range(NUM_STEPS)]
    assert read_sizes("resumed") == [
        (d, d if k % 2 == 0 else None) for k in range(NUM_STEPS) for d in (2 if k < STOP else 4,)
    ]
    assert all(main == 4 for main, _ in read_sizes("short_packs"))  # no shorter pack holds the longest sequence
