"""The order in which a rank starts its collectives, from PyTorch's flight recorder (over gloo and NCCL alike)."""

import os
import pickle
from itertools import zip_longest
from typing import Any, NamedTuple

import torch.distributed.distributed_c10d as c10d

os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "20000")  # read when the first collective starts


class Collective(NamedTuple):
    ranks: tuple[int, ...]
    """Those of its communicator."""
    communicator: str
    name: str
    sizes: str
    """Of its inputs, with their dtype; empty where ranks may differ."""


def list_collectives(first: int = 0) -> list[Collective]:
    """The collectives that this rank has started, in this order, without the `first` ones."""
    ranks = {name: tuple(sorted(c10d._world.pg_group_ranks[group])) for group, name in c10d._world.pg_names.items()}
    everyone = tuple(range(c10d.get_world_size()))  # the simulated device's groups, of two ranks, have no names
    recorded = dump_flight_recorder()["entries"]
    assert not recorded or recorded[0]["record_id"] == 0, "the recorder's buffer is too small"
    collectives = []
    for entry in recorded[first:]:
        communicator, name = entry["process_group"][0], entry["profiling_name"]
        # Each rank sends another number of tokens to experts.
        sizes = "" if "all_to_all" in name else f"{entry['input_sizes']} {entry['input_dtypes']}"
        collectives.append(Collective(ranks.get(communicator, everyone), communicator, name, sizes))
    return collectives


def dump_flight_recorder() -> dict[str, Any]:
    from torch._C import _distributed_c10d

    is_nccl = c10d.get_backend() == "nccl"
    return pickle.loads(_distributed_c10d._dump_nccl_trace() if is_nccl else _distributed_c10d._dump_fr_trace())


def find_timeout_minutes(group: c10d.ProcessGroup) -> float:
    backend = group._get_backend(group._device_types[0])
    return backend.options._timeout.total_seconds() / 60


def list_timeout_minutes() -> dict[str, float]:
    """Timeouts of all groups of which this rank is a member, by name."""
    return {name: find_timeout_minutes(group) for group, name in c10d._world.pg_names.items()}


def count_disagreements(by_rank: list[list[Collective]]) -> int:
    """Number of places at which two ranks differ in the collectives that both take part in, over all communicators:
    NCCL hangs where ranks start them in different orders."""
    count = 0
    for first, mine in enumerate(by_rank):
        for second in range(first + 1, len(by_rank)):
            a, b = (
                [one for one in collectives if {first, second} <= set(one.ranks)]
                for collectives in (mine, by_rank[second])
            )
            count += sum(x != y for x, y in zip_longest(a, b))
    return count
