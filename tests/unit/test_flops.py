"""The arithmetic of a pass, and the devices whose speed is known."""

import pytest

from vcore_ds.planning.hardware import peak_flops
from vcore_ds.planning.model_shape import QWEN3_32B
from vcore_ds.planning.passes import forward_flops


def test_a_forward_counts_two_flop_for_each_weight_and_the_causal_half_of_attention() -> None:
    weights = 64 * QWEN3_32B.layer_parameters + 151936 * 5120
    attention = 64 * 64 * (2 * 128 + 2 * 128) / 2  # layers, heads, scores and values
    assert forward_flops(QWEN3_32B, [1000, 24]) == pytest.approx(
        2 * weights * 1024 + attention * (1000**2 + 24**2), rel=1e-12
    )


@pytest.mark.parametrize(
    "name, flops",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
        ("x86_64", None),
    ],
)
def test_the_peak_flops_of_known_devices(name: str, flops: float | None) -> None:
    assert peak_flops(name) == flops
