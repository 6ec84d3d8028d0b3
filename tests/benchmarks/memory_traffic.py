"""Memory traffic of a layer's parts, the token loss and the update: by PyTorch and DeepSpeed, and by the package.

    python -m tests.benchmarks.memory_traffic [--shape 8b 0.6b] [--tokens 16384]

Counts launches, bytes and FLOP of operators below autograd on meta tensors, so it needs neither a GPU nor memory. A
kernel reads each input and writes each output once; the bytes of matrix multiplications are left out. Milliseconds are
for 3.7 TB/s and 650 TFLOP/s (450 in blocks of 256 MiB), from what one H200 reached (docs/reports/performance.md).
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.zero import stage3
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.benchmarks.gpu import SHAPES, build_engine, make_pack
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.engine.deepspeed_start import DEEPSPEED_CLIP, DEEPSPEED_PREPARE
from vcore_ds.models import pointwise, pointwise_kernels, token_loss, token_loss_kernel
from vcore_ds.planning.settings import DEFAULT_LOSS_MEMORY, LossMemory

BYTES_PER_SECOND = 3.7e12
FLOP_PER_SECOND = {DEFAULT_LOSS_MEMORY.block_bytes: 450e12}  # others 650e12

NO_TRAFFIC = set(
    "view _unsafe_view t transpose expand slice select unsqueeze squeeze permute detach alias as_strided split unbind "
    "_reshape_alias reshape empty empty_like new_empty empty_strided new_empty_strided arange lift_fresh narrow "
    "split_with_sizes set_ is_pinned".split()
)
LOGSUMEXP_PASSES = 6  # largest logit, difference, exponential in place, sum: 1 + 2 + 2 + 1


def count_bytes(tensor: Tensor) -> int:
    """Bytes of the elements in memory: an expanded tensor reads its storage only."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.element_size()


class Traffic(TorchDispatchMode):
    """Counts launches, bytes and FLOP."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.num_bytes, self.flops = 0, 0, 0.0

    def add(self, *tensors: Tensor | None) -> None:
        """Count a launch that reads or writes these tensors once."""
        self.launches += 1
        self.num_bytes += sum(count_bytes(x) for x in tensors if x is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "mm" and func._overloadname == "dtype":
            result = torch.empty(len(args[0]), args[1].shape[1], dtype=args[2], device="meta")
        elif name == "addmm" and func._overloadname == "dtype_out":
            result = kwargs["out"]
        else:
            result = func(*args, **kwargs)
        if name in NO_TRAFFIC:
            return result
        if (
            name == "_fused_adamw_"
        ):  # parameters, gradients and both moments; the gradient is written where it is scaled
            read, gradients = [x for tensors in args[:4] for x in tensors], args[1]
            written = [x for x in read if all(x is not g for g in gradients) or kwargs.get("grad_scale") is not None]
            self.add(*read, *written)
            return result
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if name == "logsumexp":
            self.add(*[args[0]] * LOGSUMEXP_PASSES)
        elif name in ("gather", "index_put_", "index", "mm", "addmm"):  # one number of each row; or FLOP, not bytes
            self.launches += 1
        elif name in ("copy_", "zero_", "fill_", "zeros", "zeros_like", "full"):
            self.add(*(args[1:2] if name == "copy_" else ()), *outputs)
        else:
            self.add(*(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), *outputs)
        if name in ("mm", "addmm"):
            left, right = args[1:3] if name == "addmm" else args[:2]
            self.flops += 2.0 * left.numel() * right.shape[-1]
        return result


@contextmanager
def kernels(traffic: Callable[[], Traffic]) -> Iterator[None]:
    """The code path of a GPU, with kernels that compute nothing and add to the present traffic."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = torch.empty_like(x)
        traffic().add(x, cos, sin, out)
        return out

    def gate(gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        traffic().add(gate, up, out)
        return out

    def gate_backward(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(gate), torch.empty_like(up)
        traffic().add(gate, up, gradient, *out)
        return out

    def losses(logits: Tensor, targets: Tensor, losses: Tensor, normalizers: Tensor, gradient: Tensor | None) -> None:
        traffic().add(logits, *([] if gradient is None else [logits, gradient]), losses, normalizers)

    def gradient(logits: Tensor, targets: Tensor, normalizers: Tensor, upstream: Tensor, out: Tensor) -> None:
        traffic().add(logits, normalizers, upstream, out)

    def norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        traffic().add(x, weight, *out)
        return out

    def norm_backward(g: Tensor, x: Tensor, shape: Any, r: Tensor, weight: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x), torch.empty_like(weight)
        traffic().add(g, x, r, weight, *out)
        return out

    replaced = {
        (pointwise, "runs_triton"): lambda x: True,
        (pointwise, "_has_fused_norm"): lambda x: True,
        (token_loss, "runs_triton"): lambda x: True,
        (torch.ops.aten, "_fused_rms_norm"): norm,
        (torch.ops.aten, "_fused_rms_norm_backward"): norm_backward,
        (pointwise_kernels, "rotate_kernel"): rotate,
        (pointwise_kernels, "gated_silu_kernel"): gate,
        (pointwise_kernels, "gated_silu_backward_kernel"): gate_backward,
        (token_loss_kernel, "losses_and_normalizers_kernel"): losses,
        (token_loss_kernel, "logit_gradient_kernel"): gradient,
        (token_loss, "_matmul_t"): lambda left, right: torch.ops.aten.mm.dtype(left, right.t(), torch.float32),
        (token_loss, "_add_matmul_"): lambda total, left, right: torch.ops.aten.addmm.dtype_out(
            total, left, right, torch.float32, out=total
        ),
    }
    with ExitStack() as patches:
        for (module, name), function in replaced.items():
            patches.enter_context(patch.object(module, name, function))
        yield


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)


def list_parts(shape: str, num_tokens: int) -> dict[str, tuple[int, Callable[[LossMemory], Any]]]:
    """Part of a layer, or the head -> elements of its input, and a function that computes it."""
    sizes: dict[str, Any] = SHAPES[shape]
    hidden, width, heads, vocabulary = (
        sizes[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    )
    kv_heads, head_dim = sizes["num_key_value_heads"], sizes["head_dim"]
    angles = [torch.empty(1, num_tokens, head_dim, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    targets = torch.empty(num_tokens * 7 // 8, dtype=torch.int64, device="meta")

    def rotate(_: LossMemory) -> tuple[Tensor, ...]:
        pair = (meta(1, num_tokens, n, head_dim).transpose(1, 2) for n in (heads, kv_heads))
        return pointwise.rotate_pair(*pair, *angles)

    return {
        "RMSNorm": (num_tokens * hidden, lambda _: pointwise.rms_norm(meta(num_tokens, hidden), meta(hidden), 1e-6)),
        "rotary embedding": (num_tokens * (heads + kv_heads) * head_dim, rotate),
        "gate": (num_tokens * width, lambda _: pointwise.gated_silu(meta(num_tokens, width), meta(num_tokens, width))),
        "token loss": (
            len(targets) * vocabulary,
            lambda memory: token_loss.token_loss(
                meta(len(targets), hidden), meta(vocabulary, hidden), targets, memory=memory
            ),
        ),
    }


MEMORIES = {
    "blocks of 256 MiB": DEFAULT_LOSS_MEMORY,
    "2 GiB": LossMemory(2**31),
    "2 GiB, logit gradients kept": LossMemory(2**31, keeps_logit_gradients=True),
}


def count_part(compute: Callable[[LossMemory], Any], memory: LossMemory, *, uses_kernels: bool) -> list[Traffic]:
    """Count the traffic of a part's forward and backward."""
    passes = [Traffic(), Traffic()]
    current = [passes[0]]
    with kernels(lambda: current[0]) if uses_kernels else ExitStack():
        with passes[0]:
            result = compute(memory)
        current[0] = passes[1]
        results = result if isinstance(result, tuple) else (result,)
        gradients = [torch.empty_like(x) for x in results]
        with passes[1]:
            torch.autograd.backward(results, gradients)
    return passes


def report(shape: str, num_tokens: int) -> None:
    print(f"{shape}, {num_tokens:,} tokens: bytes an element and launches, forward + backward; TFLOP; ms predicted")
    for name, (numel, compute) in list_parts(shape, num_tokens).items():
        for memory_name, memory in MEMORIES.items() if name == "token loss" else [("", DEFAULT_LOSS_MEMORY)]:
            for uses_kernels in (False, True):
                passes = count_part(compute, memory, uses_kernels=uses_kernels)
                num_bytes, flops = sum(x.num_bytes for x in passes), sum(x.flops for x in passes)
                rate = FLOP_PER_SECOND.get(memory.block_bytes, 650e12)
                milliseconds = 1e3 * (num_bytes / BYTES_PER_SECOND + flops / rate)
                each = " + ".join(f"{x.num_bytes / numel:.1f} B in {x.launches}" for x in passes)
                way = "kernels" if uses_kernels else "eager"
                print(f"  {name:16} {memory_name:28} {way:8} {each:34} {flops / 1e12:6.1f} {milliseconds:7.2f}")


def count_update(*, by_deepspeed: bool) -> float:
    """Bytes of memory traffic for each parameter in an update with clipping on one rank, as on a GPU, or by DeepSpeed's
    own functions: below autograd, on a CPU."""
    sizes = dict(SHAPES["8b"], hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=2)
    engine = build_engine(sizes | dict(num_key_value_heads=1, head_dim=64, vocab_size=8192))
    num_parameters = sum(getattr(p, "ds_numel", p.numel()) for _, p in engine.trainable)
    functions = {"_prepare_fp32_grad_for_sub_group": DEEPSPEED_PREPARE, "unscale_and_clip_grads": DEEPSPEED_CLIP}
    dtype = torch.float64 if by_deepspeed else torch.float32
    with ExitStack() as patches:
        patches.enter_context(patch.object(stage3, "get_norm_dtype", lambda: dtype))
        if by_deepspeed:
            patches.enter_context(patch.multiple(stage3.DeepSpeedZeroOptimizer_Stage3, **functions))
        for seed in range(2):  # the first makes DeepSpeed's buffers
            with engine.accumulation(1):
                engine.backward(engine.token_losses(make_pack(64, 8192, seed)).mean())
            with Traffic() as traffic:
                engine.step(1e-4)
    engine.close()
    return traffic.num_bytes / num_parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["8b", "0.6b"], help="sizes of a layer")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a pack, of which 7/8 are supervised")
    options = parser.parse_args()
    for shape in options.shape:
        report(shape, options.tokens)
    start_process_group(timeout_minutes=5)
    for way, by_deepspeed in (("DeepSpeed's", True), ("the package's", False)):
        print(f"update, {way}: {count_update(by_deepspeed=by_deepspeed):.1f} bytes a parameter")


if __name__ == "__main__":
    main()
