"""Functions of `torch.cuda` for the simulated device, where streams and events have nothing to do."""

import contextlib
import types
from typing import Any

import torch

from tests.helpers.simulated_cuda import host_waits

MEMORY_BYTES = 140 << 30
NAME = "NVIDIA H200"
CAPABILITY = (9, 0)


class Stream:
    """A stream that runs everything immediately."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any):
        self.device = torch.device("cuda", torch.cuda.current_device())

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        host_waits.note("synchronize")


class Event:
    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, event: "Event") -> float:
        return 1.0

    def synchronize(self) -> None:
        host_waits.note("synchronize")


def install(simulated: Any) -> None:
    """Replace functions of `torch.cuda`. `simulated`: the compiled module."""

    def set_device(chosen: Any) -> None:
        simulated.set_device(chosen if isinstance(chosen, int) else torch.device(chosen).index or 0)

    def synchronize(_: Any = None) -> None:
        host_waits.note("synchronize")

    def exchange_device(chosen: int) -> int:
        before = simulated.current_device()
        if chosen >= 0:
            simulated.set_device(chosen)
        return before

    properties = types.SimpleNamespace(
        name=NAME,
        total_memory=MEMORY_BYTES,
        multi_processor_count=132,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        shared_memory_per_block_optin=227 * 1024,
    )
    stream = Stream.__new__(Stream)  # the current device is not known yet
    stream.device = torch.device("cuda", 0)
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "_is_compiled": True, "init": None, "_lazy_init": None,
        "device_count": simulated.NUM_DEVICES, "get_device_name": NAME, "get_device_capability": CAPABILITY,
        "get_device_properties": properties, "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES), "memory_stats": {},
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "reset_peak_memory_stats": None, "empty_cache": None, "ipc_collect": None, "current_stream": stream,
        "default_stream": stream, "is_bf16_supported": True, "is_current_stream_capturing": False,
        "manual_seed": None, "manual_seed_all": None, "set_rng_state": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    functions: dict[str, Any] = {
        "set_device": set_device, "current_device": simulated.current_device, "synchronize": synchronize,
        "Stream": Stream, "Event": Event, "stream": lambda _: contextlib.nullcontext(),
        "_exchange_device": exchange_device, "_maybe_exchange_device": exchange_device,
        "get_rng_state": lambda _=None: torch.zeros(16, dtype=torch.uint8),
        "nccl": types.SimpleNamespace(version=lambda: (2, 28, 3)), "_initialized": True,
        # With them asynchronous checkpoints pin their copies in shared memory.
        "cudart": lambda: types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
    }  # fmt: skip
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    # A CPU build of PyTorch does not ask a device whether memory is pinned.
    torch.Tensor.is_pinned = lambda tensor, device=None: simulated.is_pinned(tensor)
    torch.Tensor.pin_memory = lambda tensor, device=None: (
        tensor
        if tensor.is_pinned()
        # With the strides of the original, as CUDA's: it cannot pin an expanded tensor.
        else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    )
    torch.Tensor.record_stream = lambda tensor, stream: None
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *_, **__: 0)
    torch._C._cuda_getDeviceCount = lambda: simulated.NUM_DEVICES
    torch._C._cuda_getCurrentRawStream = lambda _: 0
