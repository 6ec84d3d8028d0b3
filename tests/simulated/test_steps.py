"""Steps on the simulated device, and mistakes that it has to find as a GPU would: one launch, of one rank."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.dist.test_step_parity import CASES as PARITY_CASES
from tests.helpers import step_cases
from tests.helpers.parity import Case, run_case
from tests.helpers.simulated_cuda import host_waits
from tests.helpers.simulated_cuda.kernels import interpreted_pointwise_kernels
from tests.helpers.simulated_cuda.ranks import run_simulated
from tests.helpers.step_cases import CASES, TESTED, VARIANCE
from tests.unit.test_attention import SCALE, attend_unfused, draw_inputs, draw_sinks, make_mask
from vcore_ds.engine.zero3 import NonFiniteLoss
from vcore_ds.models import attention
from vcore_ds.training.step_metrics import StepMetrics

pytestmark = pytest.mark.dist


def in_bf16(case: Case, num_main: int = 2, num_tokens: int = 24) -> Case:
    """Change a case to bf16, with one step of few sequences."""
    sections = {**case.sections, "model": BF16}
    return replace(case, num_main=num_main, num_probe=1, num_tokens=num_tokens, max_steps=1, sections=sections)


BF16 = {"path": "none", "precision": "bf16"}
STEPS = {
    name: replace(PARITY_CASES[name], max_steps=num_steps)
    for name, num_steps in {
        "full": 2,
        "lora, tied, checkpointed, separate passes": 1,
        "MoE model, idle experts": 1,
        "finite difference": 1,
        "direction adam, lora, one probe for two steps": 2,
        "sequences and batch": 1,
    }.items()
} | {
    "full, checkpointed, separate passes, bf16": in_bf16(
        Case(checkpointing=True, coalesce=True, sections={"utility": {"fused": False}}), num_tokens=12
    ),
    "MoE model, idle experts, lora on experts, checkpointed, bf16": in_bf16(
        PARITY_CASES["MoE model, idle experts, lora on experts, checkpointed"]
    ),
}
"""Each against the oracle in plain PyTorch, which computes on the CPU in fp32. Second steps use the state that the
first leaves on the device: Adam's, and a direction."""

STEP_WITH_KERNELS = "full, checkpointed, separate passes, bf16"
"""Step that runs the kernels of norm, rotary embedding and gate, on few tokens: Triton's interpreter takes 0.2 s to
rotate 24."""

SYNCHRONISING_STEPS = {name: CASES[name] for name in TESTED} | {
    "vcore, KL budget": dict(method={"kl_budget": 0.05}),
    "vcore, batch scope": dict(method={"kl_budget": 0.05, "scope": "sequence_and_batch", "batch_kl_budget": 0.1}),
    "vcore, separate passes": dict(method=VARIANCE, utility={"fused": False}),
    "vcore, automatic epsilon": dict(method=VARIANCE, utility={"estimator": "finite_difference", "epsilon": "auto"}),
}

MOST_WAITS_PER_STEP = {
    "sft": 14,
    "sft, one reduction a step": 14,
    "dft": 14,
    "random": 16,
    "iw_sft, LoRA": 18,
    "vcore, jvp": 35,
    "vcore, jvp, LoRA": 35,
    "vcore, jvp, Adam's direction, clipped": 37,
    "vcore, jvp, fused": 35,
    "vcore, finite difference": 38,
    "vcore, finite difference, stochastic rounding, bf16": 40,
    "vcore, KL budget": 31,
    "vcore, batch scope": 38,
    "vcore, separate passes": 35,
    "vcore, automatic epsilon": 38,
}
"""Host-device synchronisations in each step, of four micro-batches and four of the probe, at most. Lower a number where
a step needs fewer."""


def count_waits(case: str) -> Counter[str]:
    """Count the synchronisations of the second step, in the package's code: the first finds epsilon."""
    with patch.dict(step_cases.CASES, SYNCHRONISING_STEPS), step_cases.steps(case, num_layers=2, overlap=True) as run:
        run.take()
        with host_waits.counted() as waits:
            run.take()
    # DeepSpeed's, some of which bound its memory, are counted in tests/dist/test_synchronisations.py.
    return Counter({place: number for place, number in waits.items() if not place.startswith("deepspeed/")})


# ---- injected mistakes ----------------------------------------------------------------------------------------------


@contextmanager
def wrapping(name: str, change: Callable[..., Any]) -> Iterator[None]:
    """Call `change` with a function of `vcore_ds.models.attention` and its arguments in place of that function."""
    before = getattr(attention, name)
    with patch.object(attention, name, lambda *arguments, **options: change(before, *arguments, **options)):
        yield


def mask_on_host(attend: Any, primals: Any, *arguments: Any) -> torch.Tensor:
    output = attend(primals, *arguments)
    return output.masked_fill(torch.zeros(output.shape[2], 1, dtype=torch.bool), 0.0)


def skip_first_token(attend: Any, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output, d_output = attend(*arguments, **options)
    unwritten = torch.empty_like(output)
    unwritten[:, :, 1:] = output[:, :, 1:]
    return unwritten, d_output


def read_output(attend: Any, primals: Any, *arguments: Any) -> torch.Tensor:
    output = attend(primals, *arguments)
    assert output.abs().max().item() >= 0
    return output


def take_step(case: str) -> StepMetrics:
    with patch.dict(step_cases.CASES, SYNCHRONISING_STEPS), step_cases.steps(case, num_layers=2, overlap=True) as run:
        return run.take()


def catch_mask_on_host() -> str:
    with wrapping("causal_attention", mask_on_host), pytest.raises(RuntimeError) as error:
        take_step("sft")
    return str(error.value)


def catch_unwritten_memory() -> str:
    with wrapping("block_attention", skip_first_token), pytest.raises(NonFiniteLoss) as error:
        take_step("vcore, separate passes")
    return str(error.value)


def count_waits_with_read() -> Counter[str]:
    with wrapping("causal_attention", read_output):
        return count_waits("sft")


def check_device() -> dict[str, Any]:
    """Operations that the device must refuse, and the number of times that others synchronise."""
    tensor = torch.empty(4, device="cuda")
    host = torch.ones(4)
    mixed: dict[str, Callable[[], Any]] = {
        "sum": lambda: tensor + host,
        "cat": lambda: torch.cat([tensor, host]),
        "matrix multiplication": lambda: tensor @ host,
        "out": lambda: torch.exp(tensor, out=host),
        "two devices": lambda: tensor + torch.ones(4, device="cuda:1"),
        "collective": lambda: torch.distributed.all_reduce(host),
    }
    refused = []
    for name, operation in mixed.items():
        with pytest.raises(RuntimeError):
            operation()
        refused.append(name)
    waiting: dict[str, Callable[[], Any]] = {
        "item": lambda: tensor.sum().item(),
        "tolist": tensor.tolist,
        "cpu": tensor.cpu,
        "nonzero": tensor.nonzero,
        "mask": lambda: tensor[tensor > 0],
        "assignment by a mask": lambda: tensor.clone().__setitem__(tensor > 0, 0.0),
        "copy": lambda: host.cuda(),
        "synchronize": torch.cuda.synchronize,
        "pinned copy": lambda: host.pin_memory().to("cuda", non_blocking=True),
        "sum": tensor.sum,
    }
    number_of_waits = {}
    for name, operation in waiting.items():
        with host_waits.counted() as waits:
            operation()
        number_of_waits[name] = waits.total()
    return {"fresh": bool(tensor.isnan().all()), "refused": refused, "waits": number_of_waits}


def measure_fused_attention() -> dict[str, Any]:
    """Relative errors of value and tangent against fp64, with packs, a window and sinks; and whether each call of the
    Triton kernel was given a value."""
    lengths, window = [[20, 13, 4], [37]], 11
    primals, tangents = draw_inputs(37, dtype=torch.bfloat16)
    sinks = draw_sinks(4)
    layout = attention.SequenceLayout.from_lengths(lengths, 1, torch.device("cuda"))
    on_device = [[x.cuda() for x in tensors] for tensors in ((*primals, sinks[0]), (*tangents, sinks[1]))]
    given: list[bool] = []

    def count(run: Any, *arguments: Any) -> Any:
        given.append(len(arguments) == 5)
        return run(*arguments)

    scoring = attention.ScoreOptions(SCALE, window)
    with wrapping("_run_triton", count):
        outputs = attention.attend_with_graph_and_tangents(*on_device, layout, scoring)
    mask = make_mask(37, window, lengths)
    exact, moving = (
        tuple(x.double() for x in (*tensors, sink)) for tensors, sink in zip((primals, tangents), sinks, strict=True)
    )
    expected = torch.func.jvp(lambda q, k, v, s: attend_unfused(q, k, v, mask, s), exact, moving)
    plain = attention.causal_attention(on_device[0], layout, scoring)
    return {
        "given": given,
        "errors": [float((x.cpu().double() - y).norm() / y.norm()) for x, y in zip(outputs, expected, strict=True)],
        "is_plain": torch.equal(outputs[0].cpu(), plain.cpu()),
    }


def run_all() -> dict[str, Any]:
    with interpreted_pointwise_kernels() as launches:
        step = run_case(STEPS[STEP_WITH_KERNELS])
    return {
        "launches": launches,
        "device": check_device(),
        "fused attention": measure_fused_attention(),
        "steps": {name: run_case(case) for name, case in STEPS.items() if name != STEP_WITH_KERNELS}
        | {STEP_WITH_KERNELS: step},
        "waits": {case: count_waits(case) for case in SYNCHRONISING_STEPS},
        "mask": catch_mask_on_host(),
        "unwritten": catch_unwritten_memory(),
        "read": count_waits_with_read(),
        "compiler": "torch._inductor.lowering" in sys.modules,
    }


@pytest.fixture(scope="module")
def results(library: Path) -> dict[str, Any]:
    return run_simulated(library, run_all, 1)[0]


def test_the_device_refuses_tensors_in_host_memory(results: dict[str, Any]) -> None:
    assert results["device"]["fresh"]
    assert results["device"]["refused"] == ["sum", "cat", "matrix multiplication", "out", "two devices", "collective"]


def test_host_device_synchronisations_are_counted(results: dict[str, Any]) -> None:
    waits = results["device"]["waits"]
    assert {name for name, number in waits.items() if number == 0} == {"pinned copy", "sum"}
    assert set(waits.values()) == {0, 1}


def test_the_flash_kernel_gives_the_tangents_of_a_fused_pass(results: dict[str, Any]) -> None:
    """The value equals that of a plain pass to the last bit."""
    print(results["fused attention"])
    assert results["fused attention"]["given"] == [True] and results["fused attention"]["is_plain"]
    assert max(results["fused attention"]["errors"]) < 1e-2


def test_a_step_uses_the_kernels_of_norm_rotation_gate_and_loss(results: dict[str, Any]) -> None:
    """A pass with tangents: four norms, two rotations and a gate in each of two layers, a last norm, the loss. Two
    passes with a gradient (main and probe): each layer forward, again, and backward."""
    assert results["launches"] == {
        "rms_norm_tangent_kernel": 9,
        "rotate_kernel": (2 + 2 * 3) * 2 * 2,  # with tangents the values' and theirs
        "gated_silu_kernel": (1 + 2 * 2) * 2,
        "gated_silu_backward_kernel": 2 * 2,
        "gated_silu_tangent_kernel": 2,
        "losses_and_normalizers_kernel": 1 + 2,
        "logit_gradient_kernel": 2,
    }


@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_the_oracles(results: dict[str, Any], name: str) -> None:
    deviations = results["steps"][name]
    print(name, deviations)
    for quantity in ("utilities", "weights", "alpha", "gradient", "loss"):
        assert deviations[quantity] < (0.06 if "bf16" in name else 1e-5), quantity


@pytest.mark.parametrize("case", SYNCHRONISING_STEPS)
def test_a_step_synchronises_no_more_often_than_allowed(results: dict[str, Any], case: str) -> None:
    waits = results["waits"][case]
    print(case, waits.total(), dict(waits))
    assert waits.total() <= MOST_WAITS_PER_STEP[case]


def test_engines_start_without_torchs_compiler(results: dict[str, Any]) -> None:
    assert not results["compiler"]


def test_a_mask_on_the_host_is_found(results: dict[str, Any]) -> None:
    assert "expected all tensors to be on the same device" in results["mask"].lower()


def test_unwritten_memory_is_found(results: dict[str, Any]) -> None:
    assert "the loss is not finite" in results["unwritten"]


def test_a_synchronisation_in_every_layer_is_found(results: dict[str, Any]) -> None:
    excess = results["read"] - results["waits"]["sft"]
    assert excess == {"models/attention.py attend_with_graph: item": 16}  # and in its recomputation
