"""Tokens a second, and the share of the devices' peak that a step uses (MFU)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vcore_ds.config.schema import Recipe
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.models.configuration import model_shape
from vcore_ds.planning.gpus import peak_flops
from vcore_ds.planning.memory_plan import MemoryPlan
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import StepPasses
from vcore_ds.planning.run_plan import needed_passes


@dataclass(frozen=True)
class Throughput:
    """What turns the seconds of a step into rates."""

    shape: ModelShape
    """Shape of the whole model, also with tensor parallelism."""
    passes: StepPasses | None
    """Those that a step needs; None for a model whose sizes are unknown."""
    peak_flops: float | None
    """Dense bf16 FLOP a second of all ranks together; None where that of a device is unknown, as on CPUs."""

    def of_step(
        self, main_lengths: Sequence[int], probe_lengths: Sequence[int], seconds: float
    ) -> dict[str, float | int | None]:
        """Tokens, FLOP and rates of a step, by their names in the metrics; docs/planning.md has the formulas.

        Args:
            main_lengths, probe_lengths: tokens of each sequence of the global batches, without padding; no probe in a
                step that takes none.
        """
        num_tokens = sum(main_lengths)
        values: dict[str, float | int | None] = {"tokens": num_tokens, "tokens_per_second": num_tokens / seconds}
        flops = None if self.passes is None else self.passes.flops(self.shape, main_lengths, probe_lengths)
        values |= {
            "flops_training": None if flops is None else flops.training,
            "flops_extra": None if flops is None else flops.extra,
        }
        peak = None if flops is None or self.peak_flops is None else self.peak_flops * seconds
        values |= {
            "utilization": None if flops is None or peak is None else flops.total / peak,
            "utilization_training": None if flops is None or peak is None else flops.training / peak,
        }
        return values


def throughput_of(recipe: Recipe, memory: MemoryPlan | None) -> Throughput:
    """For a recipe on the ranks of this job. A collective.

    Args:
        memory: None for a model whose sizes are unknown.
    """
    here = device()
    own = peak_flops(torch.cuda.get_device_name(here)) if here.type == "cuda" else None
    peaks = [peak for peak in layout.gather_objects("job", own) if peak is not None]
    return Throughput(
        model_shape(recipe.model.path),
        None if memory is None else needed_passes(recipe, memory.settings),
        sum(peaks) if len(peaks) == layout.size("job") else None,
    )
