"""A model under ZeRO-3: loading, passes, shards, the optimizer's step. The only package that imports deepspeed."""

# isort: off
from vcore_ds.engine.deepspeed_start import start_deepspeed  # before any module that imports deepspeed

# isort: on
from vcore_ds.engine.counts import count_globally
from vcore_ds.engine.export_shards import save_hugging_face
from vcore_ds.engine.flat_shards import chunks
from vcore_ds.engine.gradient_sum import unsharded_gradient_bytes
from vcore_ds.engine.loading import load_sharded
from vcore_ds.engine.log_probabilities import log_probabilities, with_reference_of_adapters
from vcore_ds.engine.non_finite import NonFiniteGradient, NonFiniteLoss, sequences_by_rank
from vcore_ds.engine.optimizer import build_optimizer
from vcore_ds.engine.partitioned import PartitionedParameter, as_partitioned
from vcore_ds.engine.zero3 import Engine

__all__ = [
    "Engine",
    "NonFiniteGradient",
    "NonFiniteLoss",
    "PartitionedParameter",
    "as_partitioned",
    "build_optimizer",
    "chunks",
    "count_globally",
    "load_sharded",
    "log_probabilities",
    "save_hugging_face",
    "sequences_by_rank",
    "start_deepspeed",
    "unsharded_gradient_bytes",
    "with_reference_of_adapters",
]
