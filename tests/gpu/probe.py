"""Single questions to a GPU: `python -m tests.gpu.probe NAME...`, each a function below.

After an error a new process goes on with the next one: after an illegal access the CUDA context is lost.
"""

import importlib
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MODULES = (
    "torch", "triton", "transformers", "peft", "deepspeed", "megatron.core", "scipy.stats", "hypothesis",
    "pytest_timeout", "xdist", "vcore_ds.commands.cli", "vcore_ds.engine.zero3", "vcore_ds.models.flash_tangent",
    "vcore_ds.models.pointwise_kernels", "tests.helpers.device_runs", "tests.benchmarks.gpu", "tests.gpu.calibrate",
)  # fmt: skip
PACKAGES = (
    "torch", "triton", "transformers", "peft", "accelerate", "deepspeed", "megatron-core", "numpy", "pytest",
    "pydantic", "datasets",
)  # fmt: skip
FP32_BOUND, BF16_BOUND, FP8_BOUND = 1e-5, 5e-3, 6e-2
"""Norms of errors relative to fp64 on the rounded inputs. An H200 gave at most 1e-6, 1.7e-3 and 3.7e-2."""


def imports() -> None:
    """Import what the parts import, and say what this machine is."""
    for name in MODULES:
        begun = time.monotonic()
        importlib.import_module(name)
        print(f"   {name} {time.monotonic() - begun:.1f} s", flush=True)
    for name in PACKAGES:
        try:
            print("  ", name, version(name))
        except PackageNotFoundError:
            print("  ", name, "not installed")
    tools = ", ".join(f"{tool} {shutil.which(tool)}" for tool in ("gcc", "nvcc", "git"))
    print(f"   Python {platform.python_version()}, {os.cpu_count()} cores, {platform.platform()}, {tools}")
    commands = "nvidia-smi; free -g | head -2; df -h /tmp /dev/shm | tail -2"
    print(subprocess.run(["sh", "-c", commands], capture_output=True, text=True).stdout)


def device() -> None:
    """Copy to the GPU, and measure its two ceilings."""
    import torch
    from triton.testing import do_bench

    from vcore_ds.data.batches import to_device

    print("  ", torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(), torch.cuda.nccl.version(), flush=True)
    for x in (torch.arange(1000), torch.arange(10).expand(3, 10)):
        assert torch.equal(to_device(x, torch.device("cuda")).cpu(), x)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print(f"   bf16 product of 8192: {2 * 8192**3 / do_bench(lambda: a @ b) / 1e9:.0f} TFLOP/s", flush=True)
    big = torch.empty(2**30, device="cuda", dtype=torch.bfloat16)
    print(f"   copy: {2 * big.nbytes / do_bench(lambda: big.clone()) / 1e6:.0f} GB/s")


def check(name: str, computed: Any, exact: Any, bound: float) -> None:
    computed, exact = (x.detach().double().cpu() for x in (computed, exact))
    error = float((computed - exact).norm() / exact.norm())
    print(f"   {name}: {error:.1e} (bound {bound:g})", flush=True)
    assert error <= bound, name


def products() -> None:
    """Products with fp32 results, as of logits and of blocks of scores, and reductions over 2^28 elements."""
    import torch

    x, w = torch.randn(1767, 1024).bfloat16(), torch.randn(20000, 1024).bfloat16()
    exact = x.double() @ w.double().t()
    check("mm to fp32", torch.mm(x.cuda(), w.cuda().t(), out_dtype=torch.float32), exact, FP32_BOUND)
    a, b = torch.randn(8, 512, 128).bfloat16(), torch.randn(8, 128, 384).bfloat16()
    computed = torch.bmm(a.cuda(), b.cuda(), out_dtype=torch.float32)
    check("bmm to fp32", computed, a.double() @ b.double(), FP32_BOUND)
    added = torch.randn(1767, 20000).bfloat16()
    computed = torch.addmm(added.cuda(), x.cuda(), w.cuda().t(), beta=0.3)
    check("addmm with beta", computed, 0.3 * added.double() + exact, BF16_BOUND)
    assert torch.randn(1767, 151936, device="cuda").logsumexp(-1).isfinite().all()


def grouped() -> None:
    """Grouped GEMMs of experts, one of them without rows."""
    import torch

    from vcore_ds.models.experts import _grouped_mm, _grouped_mm_of_transposed

    offsets = torch.tensor([5, 5, 40, 77], dtype=torch.int32)
    x, w, y = torch.randn(77, 64).bfloat16(), torch.randn(4, 64, 16).bfloat16(), torch.randn(77, 16).bfloat16()
    v = torch.randn(4, 16, 64).bfloat16().transpose(1, 2)
    ends = offsets.cuda()
    for name, weight in (("grouped", w), ("grouped, weight transposed", v)):
        exact = _grouped_mm(x.double(), weight.double(), offsets)
        check(name, _grouped_mm(x.cuda(), weight.cuda(), ends), exact, BF16_BOUND)
    exact = _grouped_mm_of_transposed(x.double(), y.double(), offsets)
    check("grouped, of transposed", _grouped_mm_of_transposed(x.cuda(), y.cuda(), ends), exact, BF16_BOUND)


def fp8() -> None:
    import torch

    from vcore_ds.models.dual_tensors import fp8_linear

    x, w = torch.randn(2, 331, 256).bfloat16(), torch.randn(512, 256).bfloat16()
    x[0, 3] = 0.0
    check("fp8, scales of rows", fp8_linear(x.cuda(), w.cuda()), x.double() @ w.double().t(), FP8_BOUND)


def profiler() -> None:
    import torch

    a = torch.randn(1024, 1024, device="cuda")
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        a @ a
        torch.cuda.synchronize()
    microseconds = sum(event.self_device_time_total for event in profile.key_averages())
    print(f"   {microseconds:.0f} microseconds of kernels")
    assert microseconds > 0, "the profiler sees no kernels"


def pointwise() -> None:
    """Triton's kernels of norms, gates and rotations, with tangents."""
    import torch
    import torch.autograd.forward_ad as forward_ad

    from vcore_ds.models import pointwise as formulas

    def norm_tangent(x: Any, weight: Any, d_x: Any, d_weight: Any) -> Any:
        with forward_ad.dual_level():
            dual = formulas.rms_norm(forward_ad.make_dual(x, d_x), weight, 1e-6, d_weight=d_weight)
            return forward_ad.unpack_dual(dual).tangent

    for size in (64, 128, 1024, 5120):
        x, d_x, up, d_up = (torch.randn(1, 8, 33, size).bfloat16() for _ in range(4))
        w, d_w = torch.randn(size).bfloat16(), torch.randn(size).bfloat16()
        exact = norm_tangent(*(t.double() for t in (x, w, d_x, d_w)))
        check(f"norm {size}", norm_tangent(*(t.cuda() for t in (x, w, d_x, d_w))), exact, BF16_BOUND)
        exact = formulas.gated_silu_tangent_(*(t.double() for t in (x, up, d_x, d_up)))
        check(f"gate {size}", formulas.gated_silu_tangent_(*(t.cuda() for t in (x, up, d_x, d_up))), exact, BF16_BOUND)
        if size <= 128:
            cos, sin = torch.randn(1, 1, 33, size).bfloat16(), torch.randn(1, 1, 33, size).bfloat16()
            exact = formulas.rotate(x.double(), cos.double(), sin.double())
            check(f"rotation {size}", formulas.rotate(x.cuda(), cos.cuda(), sin.cuda()), exact, BF16_BOUND)


def nccl() -> None:
    """Collectives of one rank over NCCL."""
    import torch
    import torch.distributed as dist

    from vcore_ds.distributed import layout
    from vcore_ds.distributed.process_group import cpu_group, run_on_first_rank, start_process_group

    for name, work in {
        "process group": lambda: start_process_group(timeout_minutes=2),
        "first all-reduce": lambda: layout.sum_over("job", [1.0]),
        "objects": lambda: layout.gather_objects("job", {"a": 1}),
        "gloo group": cpu_group,
        "work of the first rank": lambda: run_on_first_rank(lambda: 1),
        "all-gather": lambda: layout.start_all_gather("shards", torch.ones(8, device="cuda")).wait(),
    }.items():
        begun = time.monotonic()
        print(f"   {name}: {work()} in {time.monotonic() - begun:.1f} s", flush=True)
    assert dist.get_backend() == "nccl"


def engine() -> None:
    """Three steps of fused and of separate VCORE in bf16; two copies of the state to pinned memory."""
    import torch

    from tests.helpers import step_runs, tiny
    from vcore_ds.data.batches import StepBatches
    from vcore_ds.distributed.process_group import start_process_group
    from vcore_ds.engine.checkpoint_shards import Stager, state_tensors

    start_process_group(timeout_minutes=2)
    for fused in (True, False):
        recipe = step_runs.make_recipe(model={"path": "none", "precision": "bf16"}, utility={"fused": fused})
        model = tiny.token_loss_model(checkpointing=True, hidden_size=64, head_dim=64)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        made = step_runs.make_engine(model, recipe)
        estimator = step_runs.make_estimator(recipe, made)
        batches = StepBatches(step_runs.deal(tiny.make_batch(4), 2), step_runs.deal(tiny.make_batch(4, seed=9), 2))
        for _ in range(3):
            values = step_runs.train_step(made, recipe, batches, estimator).values
            print(f"   fused {fused}: loss {values['loss']:.4f}, std {values['utility_std']:.3g}", flush=True)
            assert 0 < values["loss"] < 10 and values["utility_std"] > 0
        stager, state = Stager(), state_tensors(made, None)
        for _ in range(2):
            for name, tensor in stager.stage(made, None).items():
                assert torch.equal(tensor.to_local(), state[name].to_local().cpu()), name
        made.close()


def main() -> int:
    names, has_failed = [name for name in sys.argv[1:] if name != "--failed"], "--failed" in sys.argv
    import torch

    is_rehearsal = "VCORE_DS_GPU_REHEARSAL" in os.environ
    if is_rehearsal:
        names = [name for name in names if name != "device"]
    if not torch.cuda.is_available() and not (is_rehearsal and names == ["imports"]):
        print(f"error: torch {torch.__version__} finds no GPU on {platform.node()}")
        return 1
    for place, name in enumerate(names):
        begun = time.monotonic()
        try:
            globals()[name]()
            print(f"ok {name} in {time.monotonic() - begun:.1f} s", flush=True)
        except Exception:
            traceback.print_exc()
            print(f"bad {name} in {time.monotonic() - begun:.1f} s", flush=True)
            sys.stderr.flush()
            if not (rest := names[place + 1 :]):
                return 1
            os.execv(sys.executable, [sys.executable, "-m", "tests.gpu.probe", *rest, "--failed"])
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
