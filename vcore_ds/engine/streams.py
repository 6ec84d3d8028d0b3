"""Order between the current stream and those on which DeepSpeed gathers parameters and reduces gradients.

With `overlap_comm` DeepSpeed has a stream for each of the two. That of the gathers does not wait for what the current
stream writes into shards, so a gather could read a shard before, or while, it is written (DeepSpeed issue 5545).
All waits here are waits of one stream for another, which hold nothing up on the host, unless they say otherwise. An
accelerator without streams, the CPU, executes everything in the order of the calls and needs none.
"""

from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3


class Streams:
    """The streams of one engine."""

    def __init__(self, zero: DeepSpeedZeroOptimizer_Stage3):
        """`zero`: DeepSpeed's optimizer."""
        self._has_streams: bool = not get_accelerator().resolves_data_dependency()
        self._gathers: Any = zero.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
        self._reductions: Any = zero.reduce_and_partition_stream

    def let_gathers_wait(self) -> None:
        """Gathers that start from now on read what has been written until now."""
        if self._has_streams:
            self._gathers.wait_stream(get_accelerator().current_stream())

    def wait_for_gathers(self) -> None:
        """What is written from now on is not seen by gathers that have started."""
        if self._has_streams:
            get_accelerator().current_stream().wait_stream(self._gathers)

    def wait_for_reductions(self) -> None:
        """What is read from now on are reduced gradients."""
        if self._has_streams:
            get_accelerator().current_stream().wait_stream(self._reductions)

    def hold_host_for_reductions(self) -> None:
        """The host waits until reduced gradients are in its memory, for work on the CPU, which no stream orders."""
        if self._has_streams:
            self._reductions.synchronize()
