"""What one rank works on in one optimizer step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vcore_ds.data.batches import Batch


@dataclass(frozen=True)
class StepBatches:
    """What one rank works on in one optimizer step. Ranks have equally many micro-batches; some may be idle."""

    main: Sequence[Batch]
    probe: Sequence[Batch]
    """Empty where there is nothing to probe: the method has no probe, or an earlier step's direction serves again."""
    measured: Mapping[str, float | int | None] = field(default_factory=dict)
    """How the step's batches are spread over all ranks, by the names in the metrics; empty where not measured."""
    main_lengths: Sequence[int] = ()
    """Tokens of each sequence of the global main batch, over all ranks; empty where not measured."""
    probe_lengths: Sequence[int] = ()
    """The same of the probe batch."""
    followed: Sequence[Batch] = ()
    """Traces to measure beside the step, see `vcore_ds.train.followed`; empty in most steps."""
