"""Why a step failed: parameters, the last update, or rows of the data."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from vcore_ds.common.errors import OutOfMemory, first_line, is_out_of_memory
from vcore_ds.data.batches import Batch, StepBatches
from vcore_ds.data.dataset import Dataset, JoinedDataset, find_token_store
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.distributed.position import get_position
from vcore_ds.distributed.watchdog import Identity
from vcore_ds.engine.flat_shards import as_partitioned, unpadded_shard
from vcore_ds.engine.zero3 import Engine, NonFiniteLoss, describe_sequences
from vcore_ds.planning.fit import MemoryPlan, describe_exhaustion
from vcore_ds.training import console
from vcore_ds.training.feed import Feed
from vcore_ds.training.step_metrics import StepMetrics
from vcore_ds.utility.estimators import compute_losses

MOST_ROWS = 5  # in a message


def describe_fault(error: Exception, batches: StepBatches) -> str:
    """Make the message of a non-finite loss or gradient, with the step's sequences if the error names none."""
    if isinstance(error, NonFiniteLoss):
        return f"{error}. The parameters were not updated."
    ids = [i for batch in batches.main for i in batch.sequence_ids]
    sequences = describe_sequences(ids, batches.main[0].sequence_parallel)
    return f"{error}; it is summed over {sequences}. The parameters were not updated."


@contextmanager
def advising_on_memory(plan: MemoryPlan | None) -> Iterator[None]:
    """A context in which a rank that is out of memory raises OutOfMemory, with its place and what needs less memory.
    `plan`: None for a model of unknown size."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        is_cpu = device().type == "cpu"
        advice = "Fewer tokens on a rank, or more ranks, need less memory"
        advice = advice if plan is None else describe_exhaustion(plan, is_cpu=is_cpu)
        # From None: the frames of DeepSpeed, of 80 lines, say nothing that can be changed.
        raise OutOfMemory(
            f"{Identity.current()}: {get_position()}: out of memory: {first_line(error)}\n{advice}"
        ) from None


def find_largest_value(engine: Engine) -> tuple[str, float]:
    """Find the parameter with the largest magnitude, or the first one that is not finite, and that value. A
    collective."""
    names, parameters = zip(*engine.module.named_parameters(), strict=True)
    shards = [unpadded_shard(as_partitioned(parameter)) for parameter in parameters]
    local = [float(torch.linalg.vector_norm(shard, math.inf)) if shard.numel() else 0.0 for shard in shards]
    by_rank = np.array(layout.gather_objects("job", local))
    largest = by_rank.max(axis=0)  # NaN where a rank has NaN
    first_bad = np.flatnonzero(~np.isfinite(largest))
    i = int(first_bad[0]) if len(first_bad) else int(largest.argmax())
    return names[i].removeprefix("causal_lm."), float(largest[i])


def warn_of_non_finite(engine: Engine) -> None:
    """Warn of a parameter whose loaded values are not finite. A collective."""
    name, value = find_largest_value(engine)
    if not math.isfinite(value):
        console.warn(f"{name}: not all loaded values are finite: look at the weights if losses are not finite")


def explain_fault(engine: Engine, feed: Feed, batches: StepBatches, last_step: StepMetrics | None) -> str:
    """Explain a loss or gradient that is not finite: by a parameter, the last update (`last_step`, None if this process
    has made none), or the rows of the data whose losses alone are not finite. A collective."""
    name, value = find_largest_value(engine)
    update = ""
    if last_step is not None:
        rate, norm = (last_step.values[key] for key in ("learning_rate", "grad_norm"))
        update = f"; the last update had the learning rate {rate:g} and the gradient norm {norm:.3g}"
    if not math.isfinite(value):
        return f"{name} is not finite{update}. Lower optimizer.learning_rate, unless a warning at the start names it"
    sentence = f"All parameters are finite, up to {value:.3g} in {name}{update}"
    parts = [(feed.main_dataset, batches.main), (feed.probe_dataset, batches.probe)]
    rows = dict.fromkeys(
        row for dataset, part in parts for row in describe_rows(dataset, find_non_finite_sequences(engine, part))
    )
    if not rows:
        return sentence
    more = f" and {len(rows) - MOST_ROWS:,} more" if len(rows) > MOST_ROWS else ""
    return f"{sentence}. Only these traces have losses that are not finite: {'; '.join([*rows][:MOST_ROWS])}{more}"


def find_non_finite_sequences(engine: Engine, batches: Sequence[Batch]) -> list[int]:
    """Find the sequences whose losses are not finite, by id; none if those of all are, which no sequence explains. A
    collective."""
    is_finite: dict[int, bool] = {}
    for batch, losses in zip(batches, compute_losses(engine, batches, 1), strict=True):
        parts = losses.split(batch.num_supervised_tokens().tolist())
        # Not strict: a padding pack has no sequence ids.
        is_finite |= {i: bool(part.isfinite().all()) for i, part in zip(batch.sequence_ids, parts, strict=False)}
    by_id = {i: finite for part in layout.gather_objects("job", is_finite) for i, finite in part.items()}
    return [] if not any(by_id.values()) else sorted(i for i, finite in by_id.items() if not finite)


def describe_rows(dataset: Dataset | JoinedDataset, sequence_ids: Sequence[int]) -> Iterator[str]:
    """Describe where each sequence comes from."""
    parts: Sequence[Dataset] = dataset.parts if isinstance(dataset, JoinedDataset) else [dataset]
    first_ids = dataset.first_ids if isinstance(dataset, JoinedDataset) else [0]
    for i in sequence_ids:
        part = bisect_right(first_ids, i) - 1
        store = find_token_store(parts[part])
        files, rows = store.origins()
        position = int(np.searchsorted(store.sequence_ids, i - first_ids[part]))
        yield f"{files[position]}, row {rows[position] + 1}"
