"""Steps on a GPU with one change at a time, in turns on one engine: what does each kernel and kept activation save?

    python -m tests.benchmarks.gpu_changes --shape 8b --layers 8 [--rounds 2] [--seconds 160] [--fused]

Every step takes the same packs at a learning rate of 0, so losses and gradient norms must agree, to 1e-3: the exit code
is 1 otherwise. `--shape tiny` runs on a CPU, where kernels do not. Three candidates for attention without tangents are
off in runs: `cudnn`, cuDNN's variable-length attention by PyTorch's private operators, and `flash 3` and `flash 4`,
FlashAttention's packages (`flash_attn_interface`, `flash_attn.cute`) behind PyTorch's operators. Without the package a
candidate is left out.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.benchmarks import gpu
from tests.benchmarks.gpu_plan import choose_activations_of, count_needed_flops
from tests.helpers import step_runs
from vcore_ds.data.batches import StepBatches
from vcore_ds.distributed.device import available_memory_bytes, uses_gpu
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models import attention_kernels, pointwise, token_loss
from vcore_ds.planning.hardware import peak_flops
from vcore_ds.planning.settings import DEFAULT_LOSS_MEMORY, ActivationMemory
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import ForwardMode, NoUtilities

AGREEMENT = 1e-3


class CudnnAttention(torch.autograd.Function):
    """cuDNN's causal attention of packed sequences `[n, A, D]`, and its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Any:
        attend = torch.ops.aten._cudnn_attention_forward
        results = attend(q, k, v, None, ends, ends, longest, longest, True, 0.0, True, False, scale=scale)
        ctx.save_for_backward(q, k, v, results[0], results[1], ends, results[6], results[7])
        ctx.others = longest, scale
        ctx.mark_non_differentiable(results[1])
        return results[0], results[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum_exp, ends, seed, offset = ctx.saved_tensors
        longest, scale = ctx.others
        values = dict(
            grad_out=gradient.contiguous(), query=q, key=k, value=v, out=out, logsumexp=log_sum_exp, philox_seed=seed,
            philox_offset=offset, attn_bias=None, cum_seq_q=ends, cum_seq_k=ends, max_q=longest, max_k=longest,
            dropout_p=0.0, is_causal=True, scale=scale,
        )  # fmt: skip
        backward = torch.ops.aten._cudnn_attention_backward
        arguments = backward.default._schema.arguments  # their order differs between versions of PyTorch
        positional = [values[argument.name] for argument in arguments if not argument.kwarg_only]
        named = {argument.name: values[argument.name] for argument in arguments if argument.kwarg_only}
        return *backward(*positional, **named), None, None, None


def attend_by_cudnn(kernel: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces `CudaFlash.forward`, for layers without a window."""
    group, shape = query.shape[1] // key.shape[1], (len(query), -1)
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    packed = (attention_kernels._concat_rows(x).contiguous() for x in (query, key, value))
    output, log_sum_exp = CudnnAttention.apply(*packed, kernel.cu_seqlens, kernel.max_seqlen, kernel.scale)
    return output.unflatten(0, shape).transpose(1, 2), log_sum_exp.flatten()[: query.shape[1] * len(output)]


def refuse(x: Tensor) -> bool:
    return False


EAGER_LAYERS = [(pointwise, "runs_triton", refuse), (pointwise, "_has_fused_norm", refuse)]
EAGER_LOSS = [(token_loss, "runs_triton", refuse)]
PATCHES: dict[str, list[tuple[Any, str, Any]]] = {
    "package": [],
    "eager norms": EAGER_LAYERS[1:],
    "eager norms, gates, rotations": EAGER_LAYERS,
    "eager loss": EAGER_LOSS,
    "logits recomputed": [],
    "blocks of 256 MiB": [],
    "all layers recomputed": [],
    "everything as before": [*EAGER_LAYERS, *EAGER_LOSS],
    "cudnn": [(attention_kernels.CudaFlash, "forward", attend_by_cudnn)],
    "flash 3": [],
    "flash 4": [],
}
FLASH_VERSIONS = {"flash 3": "FA3", "flash 4": "FA4"}  # names of torch.nn.attention


def is_available(variant: str) -> bool:
    """Whether a variant's attention runs here: candidates on GPUs, FlashAttention where its package is installed."""
    if variant not in FLASH_VERSIONS:
        return variant != "cudnn" or uses_gpu()
    try:
        torch.nn.attention.activate_flash_attention_impl(FLASH_VERSIONS[variant])
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        print(f"{variant}: left out: {error}")
        return False
    torch.nn.attention.restore_flash_attention_impl()
    return uses_gpu()


def choose(variant: str, chosen: ActivationMemory) -> ActivationMemory:
    """What the layers and the loss keep in a variant."""
    if variant in ("everything as before", "all layers recomputed"):
        chosen = replace(chosen, num_stored=0, stores_attention=False)
    if variant in ("everything as before", "blocks of 256 MiB"):
        return replace(chosen, loss=DEFAULT_LOSS_MEMORY)
    if variant == "logits recomputed":
        return replace(chosen, loss=replace(chosen.loss, keeps_logit_gradients=False))
    return chosen


@contextmanager
def changing(engine: Engine, variant: str, chosen: ActivationMemory) -> Iterator[None]:
    layers = engine.module.layers
    before = [layer._gradient_checkpointing_func for layer in layers]
    with ExitStack() as patches:
        for module, name, function in PATCHES[variant]:
            patches.enter_context(patch.object(module, name, function))
        for layer in layers:
            layer.gradient_checkpointing = True
        engine.module.store_activations(choose(variant, chosen))
        if variant in FLASH_VERSIONS:  # behind PyTorch's operators, which `CudaFlash` calls
            torch.nn.attention.activate_flash_attention_impl(FLASH_VERSIONS[variant])
            patches.callback(torch.nn.attention.restore_flash_attention_impl)
        try:
            yield
        finally:
            for layer, func in zip(layers, before, strict=True):
                layer._gradient_checkpointing_func = func


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(gpu.SHAPES), default="8b")
    parser.add_argument("--layers", type=int, help="instead of the shape's number")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=160, help="begin no step later")
    parser.add_argument("--fused", action="store_true", help="the fused jvp step instead of plain fine-tuning")
    parser.add_argument("--variants", nargs="+", choices=list(PATCHES), default=list(PATCHES))
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    start_process_group(timeout_minutes=10)
    sizes = dict(gpu.SHAPES[options.shape])
    sizes["num_hidden_layers"] = options.layers or sizes["num_hidden_layers"]
    method, num_tokens = ("jvp, fused" if options.fused else "sft"), 128 if options.shape == "tiny" else 16_384
    chosen = choose_activations_of(method, sizes, num_tokens, available_memory_bytes())
    engine = gpu.build_engine(sizes)
    estimator = ForwardMode(engine, Direction(engine), fused=True) if options.fused else NoUtilities(engine)
    packs = [gpu.make_pack(num_tokens, sizes["vocab_size"], seed) for seed in range(3)]
    batches = StepBatches(packs[:2], packs[2:] if options.fused else [])
    lines: dict[str, list[dict[str, float]]] = {}
    variants = [variant for variant in options.variants if is_available(variant)]
    for number in range(options.rounds + 1):
        for variant in variants:
            if time.monotonic() > end:
                continue
            if uses_gpu():
                torch.cuda.reset_peak_memory_stats()
            with changing(engine, variant, chosen):
                metrics = step_runs.train_step(engine, gpu.make_recipe(method), batches, estimator, learning_rate=0.0)
            line = {name: metrics.values[name] for name in ("seconds", "seconds_main", "loss", "grad_norm")}
            line["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if uses_gpu() else 0.0
            if number > 0:  # the first round compiles
                lines.setdefault(variant, []).append(line)
    engine.close()
    peak = peak_flops(torch.cuda.get_device_name()) if uses_gpu() else None
    flops = count_needed_flops(method, sizes, num_tokens, 2)
    medians = {
        variant: {name: statistics.median(line[name] for line in several) for name in several[0]}
        for variant, several in lines.items()
    }
    for values in medians.values():
        values["mfu"] = 0.0 if peak is None else flops / values["seconds"] / peak
    print(json.dumps({"method": method, "sizes": sizes, "chosen": repr(chosen), "steps": medians}, indent=1))
    ends = [
        [min(column), max(column)]
        for column in zip(*((v["loss"], v["grad_norm"]) for v in medians.values()), strict=True)
    ]
    return int(any(high - low > AGREEMENT * abs(low) for low, high in ends))


if __name__ == "__main__":
    raise SystemExit(main())
