"""Everything that ranks import, and what they compute at first use; once for all ranks, by the server that they are
forked from."""

from vcore_ds.common.imports import lasting_imports

with lasting_imports():  # garbage collection would look through all of it, here and at the start of every engine
    import deepspeed.ops
    import pytest  # noqa: F401

    import tests.helpers.megatron  # noqa: F401
    import vcore_ds.train.run  # noqa: F401
    from vcore_ds.distributed.device import uses_gpu

    # Imported at first use, by the start of an engine and by its first step: 0.25 s of CPU time for each rank.
    import deepspeed.comm.mori  # isort: skip
    import deepspeed.module_inject.auto_ep_layer  # isort: skip
    import deepspeed.runtime.superoffload.superoffload_stage3  # isort: skip
    import deepspeed.runtime.zero.muon.muon_optimizer  # isort: skip
    import torch._decomp.decompositions_for_jvp  # isort: skip
    import torch.profiler._cupti_monitor  # isort: skip # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # isort: skip # noqa: F401

    if not uses_gpu():  # it would initialize CUDA, which does not survive a fork
        _ = deepspeed.ops.__compatible_ops__  # DeepSpeed compiles a program to find out
