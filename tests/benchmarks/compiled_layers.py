"""Step time with compiled pointwise parts of a decoder layer: norms, rotary embedding, gated activation.

    python -m tests.benchmarks.compiled_layers [--rounds 5] [--precision bf16] [--only NAME ...]

Steps of `tests.benchmarks.overhead` on one rank, half a batch each, with these parts in one of four ways:

- plain: as Hugging Face writes them. Tangents come from PyTorch, one operation at a time.
- left out: the least that keeps all matrix multiplications. No way of computing these parts can be faster.
- norm by rule: the norm as one autograd Function that gives value and tangent, with few intermediates; eager.
- compiled: `torch.compile` (inductor) of a part's value, of its tangent, and of both together, from formulas. A dual
  tensor loses its tangent in a compiled function, where `torch.func.jvp` cannot be traced within a dual level either.

Parameters are gathered before a part runs and are its arguments, so ZeRO-3's hooks stay outside what is compiled. The
ways take turns within one engine, over the same batch. Compared are CPU seconds of each way over `plain`.

Predicted before the first run, from 20% of an SFT step that are neither matrix multiplications nor attention: compiled
takes 0.92 of a step of SFT, 0.90 of jvp and 0.88 of jvp with LoRA in bf16; rules for all parts 0.97, 0.94 and 0.93; a
graph for each part, kind of pass and precision, none for a new length. `docs/decisions/performance.md` has the results.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, rotate_half

from tests.benchmarks import overhead
from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.models.dual_tensors import make_dual

way = "plain"
"""The way in effect. A global, since the modules of one engine switch between the ways."""


# ---- values, as Hugging Face has them, for the compiler; and tangents, for both -------------------------------------


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def along_sphere(unit: Tensor, d_x: Tensor, scale: Tensor) -> Tensor:
    """`scale * (d_x - unit * mean(unit * d_x))`: the derivative of a normalized vector, which is symmetric."""
    return torch.addcmul(d_x, unit, (unit * d_x).mean(-1, keepdim=True), value=-1).mul_(scale)


def norm_with_tangent(
    x: Tensor, weight: Tensor, d_x: Tensor | None, d_weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Value and tangent of a norm, from at least one tangent."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    unit = wide * scale
    narrow = unit.to(x.dtype)
    from_weight = 0 if d_weight is None else d_weight * narrow
    from_x = 0 if d_x is None else weight * along_sphere(unit, d_x.float(), scale).to(x.dtype)
    return weight * narrow, from_x + from_weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def gated_with_tangent(gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor) -> tuple[Tensor, Tensor]:
    active = silu(gate)
    d_active = torch.ops.aten.silu_backward(d_gate, gate)
    return active * up, d_active.mul_(up).addcmul_(d_up, active)


# ---- the norm in few operations --------------------------------------------------------------------------------------


class Norm(torch.autograd.Function):
    """Norm that returns its value and tangent, None without a tangent."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, d_x: Tensor | None, d_weight: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor | None]:
        wide = x.float()
        squares = wide.square()
        scale = squares.mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        unit = torch.mul(wide, scale, out=squares)
        narrow = unit.to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        d_y = None if d_weight is None else d_weight * narrow
        if d_x is not None:
            from_x = weight * along_sphere(unit, d_x.float(), scale).to(x.dtype)
            d_y = from_x if d_y is None else d_y.add_(from_x)
        if d_y is not None:
            ctx.mark_non_differentiable(d_y)
        return weight * narrow, d_y

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        unit = x.float() * scale
        by_weight = (grad * unit.to(x.dtype)).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return along_sphere(unit, (grad * weight).float(), scale).to(x.dtype), by_weight, None, None, None


# ---- a part, in the way that is in effect ---------------------------------------------------------------------------


def compile_part(value: Callable[..., Tensor], both: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Compile a part. Without gradients one function computes value and tangent. With gradients the value has a graph;
    the tangent has none, and is compiled separately so that no second value is written."""
    functions = value, both, lambda *arguments: both(*arguments)[1]
    compute_value, compute_both, compute_tangent = (torch.compile(f, dynamic=True, fullgraph=True) for f in functions)

    def function(values: Sequence[Tensor], tangents: Sequence[Tensor | None], *rest: Any) -> Any:
        if all(tangent is None for tangent in tangents):
            return compute_value(*values, *rest), None
        if not torch.is_grad_enabled():
            return compute_both(*values, *tangents, *rest)
        with torch.no_grad():
            tangent = compute_tangent(*(x.detach() for x in values), *tangents, *rest)
        return compute_value(*values, *rest), tangent

    return function


WAYS: dict[str, dict[str, Callable[..., Any]]] = {
    "plain": {},
    "left out": {
        "norm": lambda x, weight, epsilon: x * weight,
        "rotated": lambda x, cos, sin: x,
        "gated": lambda gate, up: gate + up,
    },
    "norm by rule": {"norm": lambda values, tangents, epsilon: Norm.apply(*values, *tangents, epsilon)},
    "compiled": {
        "norm": compile_part(norm, norm_with_tangent),
        "rotated": compile_part(rotated, lambda x, d_x, *rest: (rotated(x, *rest), rotated(d_x, *rest))),
        "gated": compile_part(gated, gated_with_tangent),
    },
}


def apply(name: str, plain: Callable[[], Tensor], duals: tuple[Tensor, ...], *rest: Any) -> Tensor:
    """Apply a part to tensors that may be dual, in the way in effect."""
    function = WAYS[way].get(name)
    if function is None:
        return plain()
    if way == "left out":
        return function(*duals, *rest)
    with torch._C.DisableTorchFunction():  # else the fused pass would split the dual tensors, too
        values, tangents = zip(*map(forward_ad.unpack_dual, duals), strict=True)
        value, tangent = function(values, tangents, *rest)
        return value if tangent is None else make_dual(value, tangent)


class OurNorm(Qwen3RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return apply("norm", lambda: super(OurNorm, self).forward(x), (x, self.weight), self.variance_epsilon)


class OurMLP(Qwen3MLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(apply("gated", lambda: gated(gate, up), (gate, up)))


def our_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotate = [apply("rotated", lambda x=x: rotated(x, cos, sin), (x,), cos, sin) for x in (query, key)]
    return rotate[0], rotate[1]


def replace_parts(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) in (Qwen3RMSNorm, Qwen3MLP):
            module.__class__ = OurNorm if type(module) is Qwen3RMSNorm else OurMLP
    modeling_qwen3.apply_rotary_pos_emb = our_rotary


# ---- measuring ------------------------------------------------------------------------------------------------------


def make_engine(name: str, precision: str) -> tuple[Any, Engine]:
    variant = overhead.VARIANTS[name]
    recipe = step_runs.make_recipe(model={"path": "none", "precision": precision}, **variant.sections)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = tiny.token_loss_model(
        tied=True, dtype=dtype, lora=variant.lora, checkpointing=variant.checkpointing, **overhead.MODEL
    )
    replace_parts(model)
    config = overhead.deepspeed_config() | {"bf16": {"enabled": precision == "bf16"}}
    engine = Engine(model, build_optimizer(model, recipe.optimizer), config, coalesce_gradient_reduction=True)
    return recipe, engine


def measure(name: str, precision: str, num_rounds: int, ways: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """CPU seconds, wall seconds and number of compiled graphs of each step in each way; the first of each warms up."""
    global way
    torch._dynamo.config.recompile_limit = 64
    feed = overhead.make_feed(overhead.NUM_MAIN // 2, overhead.NUM_PROBE // 2)
    recipe, engine = make_engine(name, precision)
    estimator = step_runs.make_estimator(recipe, engine)
    measured: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "wall": [], "graphs": []} for name in ways}
    for k in range(num_rounds + 1):
        batches = feed.step(k)
        for way in [*ways[k % len(ways) :], *ways[: k % len(ways)]]:
            cpu, wall = time.process_time(), time.perf_counter()
            step_runs.train_step(engine, recipe, batches, estimator)
            measured[way]["cpu"].append(time.process_time() - cpu)
            measured[way]["wall"].append(time.perf_counter() - wall)
            measured[way]["graphs"].append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    names = [name for name in overhead.VARIANTS if "MoE" not in name]
    parser.add_argument("--only", nargs="+", choices=names, default=["sft", "jvp", "sft, lora", "jvp, lora"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="plain, then others")
    arguments = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for name in arguments.only:
        options = name, arguments.precision, arguments.rounds, arguments.ways
        measured = run_ranks(measure, 1, *options, timeout_seconds=3600)[0]
        plain = measured["plain"]["cpu"][1:]
        print(f"{name}, {arguments.precision}: {statistics.median(plain):.2f} CPU s a step, plain", flush=True)
        for way in arguments.ways[1:]:
            ratios = overhead.ratio(measured[way]["cpu"][1:], plain)
            print(f"  {way:12}", *(f"{key} {value:.3f}" for key, value in ratios.items()), end="  ")
            print(
                f"first step {measured[way]['wall'][0]:.1f} s; graphs", *map(int, measured[way]["graphs"]), flush=True
            )


if __name__ == "__main__":
    main()
