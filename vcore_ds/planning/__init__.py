"""The arithmetic of a batch on many ranks: which share a row, what runs together, how long that takes. Pure Python."""

from vcore_ds.planning.model_shape import (
    ATTENTION_LAYERS,
    OTHER_LAYERS,
    QWEN3_32B,
    ModelShape,
    layer_parameters,
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
    "Machine",
    "ModelShape",
    "RowLimit",
    "Spread",
    "TimeModel",
    "Utilization",
    "Waste",
    "degrees_that_hold",
    "layer_parameters",
    "measure_waste",
    "pack_batch",
    "padded_length",
    "possible_degrees",
    "row_obstacles",
    "shape_on_disk",
    "simulated_batches",
    "split_batch",
    "spread",
    "summarize",
]
