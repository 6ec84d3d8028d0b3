"""Imports and first-use computations of ranks, made once for all of them by the server from which they are forked."""

from vcore_ds.common.imports import lasting_imports

AT_FIRST_USE = (
    "datasets",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "pandas",
    "pyarrow.parquet",
    "scipy.stats",
    "torch._decomp.decompositions_for_jvp",
    "torch.profiler._cupti_monitor",
    "transformers.models.qwen3.modeling_qwen3",
    "vcore_ds.commands.cli",
    "vcore_ds.data.prepare.pipeline",
)
"""Modules that are imported at an engine's start and first step: 0.25 s of CPU time per rank, mostly for the
decompositions, which TorchScript compiles. pandas, which pyarrow imports when the first rank writes a store, is 0.7 s,
datasets, which prepares raw data, 1.8 s, and scipy.stats, for tests that compute correlations, 0.25 s."""

with lasting_imports():  # garbage collection would traverse all of it, here and at the start of every engine
    import importlib

    import deepspeed.ops
    import pytest  # noqa: F401
    import torch

    import tests.helpers.megatron  # noqa: F401
    import vcore_ds.training.run  # noqa: F401
    from vcore_ds.distributed.device import uses_gpu

    for name in AT_FIRST_USE:
        importlib.import_module(name)
    if not uses_gpu():  # this would initialize CUDA, which does not survive a fork
        _ = deepspeed.ops.__compatible_ops__  # DeepSpeed compiles a program to compute it
    # DeepSpeed formats an engine's arguments, with the values of all parameters, for a message that it does not print:
    # a tenth of the time of an engine and two steps.
    torch.nn.Parameter.__repr__ = object.__repr__
