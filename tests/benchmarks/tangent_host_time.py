"""Host time (Python and dispatch) of a decoder layer of Qwen3 with and without tangents.

    python -m tests.benchmarks.tangent_host_time [--rounds 9] [--attempts 60]

A layer takes the branches of a GPU in bf16, with sizes so small that kernels take almost no time. Triton launches as on
a GPU, up to the driver; FlashAttention returns immediately. Parameters become dual by the hooks of a run, without its
all-gathers. The passes take turns; results are medians over rounds of the lower quartile of the attempts, in CPU
milliseconds. A CUDA launch takes 2 to 4 microseconds more than the CPU kernel that replaces it.

The reference is the forward of Hugging Face's layer with attention cut out, 0.6 ms on the machine whose host times
are in `vcore_ds.planning.hardware`. The last column is scaled to that machine, round by round. `tangent_overhead` is
the time of a layer with tangents there beyond `layer_overhead`.

Triton decides once per process whether there is a GPU, and this file starts it without one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.benchmarks.kernel_compiles import NoDevice
from vcore_ds.models import attention, flash_tangent, pointwise
from vcore_ds.models.dual_tensors import LowRank
from vcore_ds.utility.forward_mode import dual_parameters
from vcore_ds.utility.fused_forward import UnrecordedTangents

REFERENCE_MS = 0.6
"""Time of the reference on the machine of `Achieved` (2026-11-24)."""

SIZES = dict(
    hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
    vocab_size=64, attention_bias=False,
)  # fmt: skip
NUM_TOKENS, RANK = 16, 16

REFERENCE = "the reference: Hugging Face's forward without attention"
Pass = Callable[[], object]


# ---- a GPU without its kernels ---------------------------------------------------------------------------------------


def launch_on_no_device() -> None:
    """Make Triton launch without a GPU: all steps up to the driver's call, but no compilation."""
    driver.set_active(NoDevice())
    kernel = SimpleNamespace(
        run=lambda *arguments: None, function=0, packed_metadata=(), launch_metadata=lambda *arguments: None
    )

    def compile_nothing(self: Any, key: Any, signature: Any, device: Any, *others: Any) -> Any:
        return self.device_caches[device][0].setdefault(key, kernel)

    JITFunction._do_compile = compile_nothing
    flash_tangent.local_cache_folder = lambda: None
    tile = flash_tangent.half_precision_tiles(SIZES["head_dim"], value_is_given=True, has_tensor_memory=False)[0]
    flash_tangent.take_first_answer = lambda *_: json.dumps(flash_tangent._make_config(*tile).all_kwargs())


library = torch.library.Library("aten", "IMPL", "CPU")
"""Its operators exist as long as this object."""


def take_gpu_branches() -> None:
    """Make attention and pointwise tangents choose the kernels of a GPU on the CPU."""
    launch_on_no_device()
    attention._can_use_flash = attention._can_use_triton = pointwise._can_use_triton = lambda *_: True

    def forward(query: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        return torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32), *[NOTHING] * 3

    def backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Any:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    library.impl("_flash_attention_forward", forward)
    library.impl("_flash_attention_backward", backward)


NOTHING = torch.empty(0)


# ---- the passes of a layer -------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """A model of one layer, with the attributes that `dual_parameters` reads."""

    def __init__(self) -> None:
        super().__init__()
        config = Qwen3Config(**SIZES)
        self.layers = nn.ModuleList([Qwen3DecoderLayer(config, 0)]).to(torch.bfloat16)
        self.base = SimpleNamespace(config=config)
        x, cos, sin = torch.randn(3, 1, NUM_TOKENS, SIZES["hidden_size"]).to(torch.bfloat16)
        self.x = x
        self.arguments = dict(
            position_embeddings=(cos[..., : SIZES["head_dim"]], sin[..., : SIZES["head_dim"]]),
            sequence_layout=attention.SequenceLayout.from_lengths([[NUM_TOKENS]], 1, torch.device("cpu")),
            attention_mask=None,
        )

    def run(self, x: Tensor) -> Tensor:
        output = self.layers[0](x, **self.arguments)
        return output if isinstance(output, Tensor) else output[0]


class DrawnDirection:
    """A direction that needs no all-gathers."""

    def __init__(self, model: Layers, rank: int | None, *, fp8_tangents: bool = False):
        parameters = list(model.layers.parameters())
        self.rank, self.fp8_tangents = rank, fp8_tangents
        self.groups = [(model.layers[0], parameters)]
        self._tangents = {id(p): self._draw(p) for p in parameters}

    def _draw(self, parameter: Tensor) -> Tensor | LowRank:
        if self.rank is None or parameter.dim() < 2:
            return torch.randn_like(parameter)
        num_rows, num_columns = parameter.shape
        left, right = parameter.new_ones(num_rows, self.rank), parameter.new_ones(self.rank, num_columns)
        return LowRank(left, right)

    def low_rank_tangents(self) -> dict[int, Tensor | LowRank]:
        return self._tangents

    def start_gather(self, number: int) -> list[Any]:
        return []

    def finish_gather(self, gathers: list[Any]) -> dict[int, Tensor | LowRank]:
        return dict(self._tangents)

    def shard(self, parameter: Tensor) -> Tensor:
        return parameter


@contextmanager
def attention_cut_out() -> Iterator[None]:
    before = attention._attend_on_gpu, attention._run_triton
    attention._attend_on_gpu = lambda primals, *_: (torch.empty_like(primals[0]), NOTHING)
    attention._run_triton = lambda primals, *_: (primals[0], torch.empty_like(primals[0]))
    yield
    attention._attend_on_gpu, attention._run_triton = before


def make_passes() -> dict[str, tuple[Callable[[], AbstractContextManager[object]], Pass]]:
    """Name -> the context in which a pass is repeated, and the pass."""
    plain, model = Layers(), Layers()
    pointwise.use_formulas(model)
    for layers in (plain, model):
        layers.base.config._attn_implementation = attention.TRAINING_ATTENTION
    engine: Any = SimpleNamespace(module=model, trainable=[])

    def run_plain() -> None:
        with torch.no_grad():
            plain.run(plain.x)

    def forward() -> None:
        with torch.no_grad():
            model.run(model.x)

    def recompute_and_backward() -> None:
        y = model.run(model.x.detach().requires_grad_())
        torch.autograd.backward(y, y.detach())
        model.zero_grad()

    def with_tangents() -> None:
        # As in a checkpoint of the fused pass.
        with torch.no_grad(), forward_ad.dual_level():
            y = model.run(forward_ad.make_dual(model.x, model.x.clone()))
            assert forward_ad.unpack_dual(y).tangent is not None

    @contextmanager
    def duals(mode: Any, cut: Any = nullcontext, **options: Any) -> Iterator[None]:
        direction: Any = DrawnDirection(model, **options)
        with dual_parameters(engine, direction, attention=attention.FUSED_ATTENTION, with_graph=True), mode, cut():
            yield

    return {
        REFERENCE: (attention_cut_out, run_plain),
        "fine-tuning, forward": (nullcontext, forward),
        "fine-tuning, recomputation and backward": (nullcontext, recompute_and_backward),
        "with tangents, full rank": (lambda: duals(UnrecordedTangents(), rank=None), with_tangents),
        "the same, attention cut out": (
            lambda: duals(UnrecordedTangents(), attention_cut_out, rank=None),
            with_tangents,
        ),
        "the same, without the function mode": (lambda: duals(nullcontext(), rank=None), with_tangents),
        f"with tangents, rank {RANK}": (lambda: duals(UnrecordedTangents(), rank=RANK), with_tangents),
        f"with tangents, rank {RANK}, FP8": (
            lambda: duals(UnrecordedTangents(), rank=RANK, fp8_tangents=True),
            with_tangents,
        ),
    }


def measure_lower_quartile(run: Pass, attempts: int) -> float:
    """Lower quartile of a pass's CPU milliseconds."""
    run()
    times = []
    for _ in range(attempts):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * sorted(times)[attempts // 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--attempts", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    take_gpu_branches()
    passes = make_passes()
    milliseconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(options.rounds):
        for name, (context, run) in passes.items():
            with context():
                milliseconds[name].append(measure_lower_quartile(run, options.attempts))
    print("| a layer | ms here, median (least, most) | scaled |\n| --- | --- | --- |")
    for name, rounds in milliseconds.items():
        median = statistics.median(rounds)
        ratio = statistics.median(ms / reference for ms, reference in zip(rounds, milliseconds[REFERENCE], strict=True))
        print(f"| {name} | {median:.2f} ({min(rounds):.2f}, {max(rounds):.2f}) | {REFERENCE_MS * ratio:.2f} |")


if __name__ == "__main__":
    main()
