"""Predictions for the steps of tests/benchmarks/gpu.py: memory, FLOP and, on a GPU with a known peak, seconds."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vcore_ds.config.load import SHIPPED_DEEPSPEED_CONFIGS
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import num_local_ranks, uses_gpu
from vcore_ds.planning.batch_layout import BatchLayout, Waste
from vcore_ds.planning.deepspeed_json import read_zero_settings
from vcore_ds.planning.fit import Available, choose_activations
from vcore_ds.planning.hardware import Cluster, KernelTraffic, find_gpu
from vcore_ds.planning.memory import Phase, estimate_memory
from vcore_ds.planning.model_shape import ModelShape, layer_parameters
from vcore_ds.planning.passes import StepPasses, TimeModel, parameter_counts
from vcore_ds.planning.settings import ActivationMemory, MemorySettings
from vcore_ds.planning.step_cost import StepModel

PARTS_OF_A_PACK = (8, 4, 3, 1)
"""Lengths of a pack's sequences, in sixteenths."""


def make_shape(sizes: dict[str, Any]) -> ModelShape:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    hidden, heads, kv_heads, head_dim, width = (sizes[name] for name in names)
    return ModelShape(
        sizes["num_hidden_layers"], heads, kv_heads, head_dim,
        layer_parameters(hidden, heads, kv_heads, head_dim, width), hidden_size=hidden, intermediate_size=width,
        vocabulary_size=sizes["vocab_size"], is_tied=sizes["tie_word_embeddings"], normalizes_heads=True,
    )  # fmt: skip


def pack_lengths(num_tokens: int) -> list[int]:
    return [num_tokens * part // 16 for part in PARTS_OF_A_PACK]


def read_zero_section(deepspeed_config: str) -> dict[str, Any]:
    """The section zero_optimization of a shipped DeepSpeed JSON, `FILE` or `FILE:KEY=NUMBER` with one key changed."""
    file, _, change = deepspeed_config.partition(":")
    content: dict[str, Any] = json.loads((SHIPPED_DEEPSPEED_CONFIGS / file).read_text())
    section = content["zero_optimization"]
    if change:
        key, _, value = change.partition("=")
        section[key] = int(value)
    return section


def make_memory_settings(method: str, num_tokens: int, deepspeed_config: str = "zero3_bf16.json") -> MemorySettings:
    """Settings that determine memory and passes of a method's step, with a pack of `num_tokens` as its micro-batch."""
    zero = read_zero_section(deepspeed_config)
    is_vcore, is_fused = method != "sft", "fused" in method
    return MemorySettings(
        num_ranks=layout.size("shards"),
        main_tokens=num_tokens,
        probe_tokens=num_tokens if is_vcore else 0,
        utility_tokens=num_tokens if is_vcore and not is_fused else 0,
        estimator=("finite_difference" if method == "finite difference" else "jvp") if is_vcore else None,
        probe_rank=int(method.rpartition(" ")[2]) if "rank" in method else None,
        is_fused=is_fused,
        is_checkpointed=True,
        on_gpu=uses_gpu(),
        zero=read_zero_settings({"zero_optimization": zero}, layout.size("shards")),
    )


def choose_activations_of(
    method: str, sizes: dict[str, Any], num_tokens: int, num_bytes: int, deepspeed_config: str = "zero3_bf16.json"
) -> ActivationMemory:
    """What a run with `model.gradient_checkpointing: auto` keeps in so much memory."""
    settings = make_memory_settings(method, num_tokens, deepspeed_config)
    return choose_activations(make_shape(sizes), settings, None, Available(num_bytes, 0), recomputes_all=False)


def estimate_peak_bytes(
    method: str,
    sizes: dict[str, Any],
    num_tokens: int,
    deepspeed_config: str = "zero3_bf16.json",
    activations: ActivationMemory | None = None,
) -> int:
    """Bytes at the peak of a step, as the check before a run estimates them."""
    settings = make_memory_settings(method, num_tokens, deepspeed_config)
    if activations is not None:
        settings = replace(settings, activations=activations)
    return estimate_memory(make_shape(sizes), settings).peak_bytes


def count_needed_flops(method: str, sizes: dict[str, Any], num_tokens: int, num_packs: int) -> float:
    """FLOP of a rank's step as MFU counts them, without the recomputation of activation checkpoints."""
    passes = StepPasses.derive(replace(make_memory_settings(method, num_tokens), is_checkpointed=False))
    lengths = pack_lengths(num_tokens)
    return sum(passes.flops(make_shape(sizes), lengths * num_packs, lengths))


def predict_seconds(
    method: str, sizes: dict[str, Any], num_tokens: int, num_packs: int, deepspeed_config: str
) -> Mapping[Phase, float] | None:
    """Seconds of each phase by the plan's cost model; None on a device whose peak is unknown."""
    gpu = find_gpu(torch.cuda.get_device_name()) if uses_gpu() else None
    if gpu is None:
        return None
    settings = make_memory_settings(method, num_tokens, deepspeed_config)
    return predict_step(settings, make_shape(sizes), num_packs, Cluster(gpu, settings.num_ranks, num_local_ranks()))


def predict_step(
    settings: MemorySettings,
    shape: ModelShape,
    num_packs: int,
    cluster: Cluster,
    kernels: KernelTraffic | None = None,
) -> Mapping[Phase, float]:
    """Seconds of each phase of a step with `num_packs` packs of `settings.main_tokens` on every rank, one a micro-step,
    and one of the probe."""
    ranks, pack = settings.num_ranks, pack_lengths(settings.main_tokens)

    def batch(num_packs: int) -> tuple[list[int], BatchLayout]:
        steps = [
            [list(range(start, start + len(pack))) for start in range(first, first + ranks * len(pack), len(pack))]
            for first in range(0, num_packs * ranks * len(pack), ranks * len(pack))
        ]
        num_total = num_packs * ranks * settings.main_tokens
        waste = Waste(num_total, num_total, num_total / ranks, num_total / ranks, 0)
        return pack * ranks * num_packs, BatchLayout(1, steps, waste, settings.main_tokens, True, 0.0)

    time = TimeModel(shape, ranks, cluster.ranks_per_node)
    model = StepModel(time, parameter_counts(shape), settings, cluster, kernels)
    probe = [batch(1)] if settings.probe_tokens else []
    return model.estimate_step(StepPasses.derive(settings), [batch(num_packs)], probe).seconds
