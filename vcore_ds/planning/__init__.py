"""The arithmetic of a batch on many ranks: which share a row, what runs together, how long that takes. Pure Python."""

from vcore_ds.planning.flops import forward_flops
from vcore_ds.planning.gpus import GPUS, Achieved, Cluster, Gpu, find_gpu, peak_flops
from vcore_ds.planning.known_models import KNOWN_MODELS, known_model
from vcore_ds.planning.memory import MemoryEstimate, Phase, memory_of
from vcore_ds.planning.memory_settings import AdapterShape, MemorySettings, ParameterCounts, parameter_counts
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
from vcore_ds.planning.passes import PassWork, StepPasses
from vcore_ds.planning.spread import FREE_TOKENS, RowLimit, Spread, degrees_that_hold, possible_degrees, spread
from vcore_ds.planning.step_cost import StepCost, StepModel
from vcore_ds.planning.time_model import CPU, H100, TimeModel
from vcore_ds.planning.traffic import Machine, Traffic, exchanged, exchanged_numbers, gathered
from vcore_ds.planning.utilization import SIMULATED_MEAN, Utilization, simulated_batches, summarize
from vcore_ds.planning.waste import Waste, measure_waste

__all__ = [
    "ATTENTION_LAYERS",
    "CPU",
    "FREE_TOKENS",
    "GPUS",
    "H100",
    "KNOWN_MODELS",
    "OTHER_LAYERS",
    "QWEN3_32B",
    "SIMULATED_MEAN",
    "Achieved",
    "AdapterShape",
    "Cluster",
    "Gpu",
    "Machine",
    "MemoryEstimate",
    "MemorySettings",
    "ModelShape",
    "ParameterCounts",
    "PassWork",
    "Phase",
    "RowLimit",
    "Spread",
    "StepCost",
    "StepModel",
    "StepPasses",
    "TimeModel",
    "Traffic",
    "Utilization",
    "Waste",
    "degrees_that_hold",
    "exchanged",
    "exchanged_numbers",
    "find_gpu",
    "forward_flops",
    "gathered",
    "known_model",
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
    "summarize",
]
