"""The arithmetic of a batch on many ranks: which share a row, what runs together, how long that takes. Pure Python."""

from vcore_ds.planning.flops import forward_flops, peak_flops, step_flops
from vcore_ds.planning.memory import MemoryEstimate, memory_of, parameter_counts
from vcore_ds.planning.memory_settings import AdapterShape, MemorySettings, ParameterCounts
from vcore_ds.planning.model_shape import (
    ATTENTION_LAYERS,
    OTHER_LAYERS,
    QWEN3_32B,
    ModelShape,
    layer_parameters,
    memory_sizes,
    row_obstacles,
    shape_on_disk,
)
from vcore_ds.planning.packing import pack_batch, padded_length, split_batch
from vcore_ds.planning.spread import FREE_TOKENS, RowLimit, Spread, degrees_that_hold, possible_degrees, spread
from vcore_ds.planning.time_model import CPU, H100, Machine, TimeModel
from vcore_ds.planning.utilization import SIMULATED_MEAN, Utilization, simulated_batches, summarize
from vcore_ds.planning.waste import Waste, measure_waste

__all__ = [
    "ATTENTION_LAYERS",
    "CPU",
    "FREE_TOKENS",
    "H100",
    "OTHER_LAYERS",
    "QWEN3_32B",
    "SIMULATED_MEAN",
    "AdapterShape",
    "Machine",
    "MemoryEstimate",
    "MemorySettings",
    "ModelShape",
    "ParameterCounts",
    "RowLimit",
    "Spread",
    "TimeModel",
    "Utilization",
    "Waste",
    "degrees_that_hold",
    "forward_flops",
    "layer_parameters",
    "measure_waste",
    "memory_of",
    "memory_sizes",
    "pack_batch",
    "padded_length",
    "parameter_counts",
    "peak_flops",
    "possible_degrees",
    "row_obstacles",
    "shape_on_disk",
    "simulated_batches",
    "split_batch",
    "spread",
    "step_flops",
    "summarize",
]
