"""The node of this rank, from the environment variables of the launcher that started it. Standard library only."""

import os


def local_rank() -> int:
    """This rank's position among the ranks of its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_local_ranks() -> int:
    """Number of ranks on this node: LOCAL_WORLD_SIZE under torchrun, LOCAL_SIZE under the deepspeed launcher. Where
    neither is set, all ranks of the job are taken to be on this node."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1
