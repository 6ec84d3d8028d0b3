"""The DeepSpeed internals that docs/zero3.md lists and that steps against the reference do not watch, one check for
each: an upgrade that changes one fails by its name."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus
from deepspeed.utils import numa, safe_get_local_fp32_param, z3_leaf_module

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.streams import accelerator_with_streams
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.engine.deepspeed_start import (
    DEEPSPEED_CLIP,
    DEEPSPEED_PREPARE,
    DEEPSPEED_WAIT,
    clip_in_update,
    copy_gathered_parameters,
    update_from_buffer,
)
from vcore_ds.engine.zero3 import Engine, build_optimizer

pytestmark = pytest.mark.dist


def make_engine(bf16: bool = False) -> Engine:
    recipe = step_runs.make_recipe(model={"path": "none", "precision": "bf16" if bf16 else "fp32"})
    model = tiny.token_loss_model()
    config = tiny.deepspeed_config(bf16=bf16, gradient_clipping=1.0, persistence_threshold=500)
    config["zero_force_ds_cpu_optimizer"] = False
    config["zero_optimization"]["sub_group_size"] = 5000
    return Engine(model, build_optimizer(model, recipe.optimizer), config)


def compute_loss(e: Engine, seed: int = 0) -> torch.Tensor:
    return e.token_losses(step_runs.deal(tiny.make_batch(4, seed=seed), 2)[0]).mean()


def accumulate(e: Engine, seed: int = 0) -> None:
    with e.accumulation(1):
        e.backward(compute_loss(e, seed))


def the_shard_is_the_cast_of_the_master(e: Engine) -> bool:
    for k in range(2):
        accumulate(e, seed=k)
        e.step(1e-2)
    return all(
        torch.equal(safe_get_local_fp32_param(p).detach().view(-1).to(p.dtype), p.ds_tensor.data.view(-1))
        for _, p in e.trainable
    )


def a_changed_shard_is_read_only_after_the_cache_is_emptied(e: Engine) -> bool:
    accumulate(e)  # from the first backward on, ZeRO-3 keeps parameters that are used again
    with e.without_gradient():
        before = compute_loss(e)
        shard = dict(e.trainable)["causal_lm.model.norm.weight"].ds_tensor.data  # small, so it is never released
        kept = shard.clone()
        shard.mul_(3.0)
        stale = compute_loss(e)
        e.optimizer.empty_partition_cache()
        fresh = compute_loss(e)
        shard.copy_(kept)
        e.optimizer.empty_partition_cache()
        after = compute_loss(e)
    # Stale reads are the only reason why `changing_shards` empties the cache.
    return torch.equal(stale, before) and not torch.equal(fresh, before) and torch.equal(after, before)


def a_layer_is_a_leaf_with_identity_functions(e: Engine) -> bool:
    layer = e.module.layers[0]
    wrappers = [layer.__dict__.get(name) for name in ("pre_bwd_fn", "post_bwd_fn")]
    x = torch.randn(3)
    return z3_leaf_module(layer) and all(torch.equal(f.apply(x), x) for f in wrappers)


def all_gathers_and_reductions_use_the_streams_that_are_waited_for(e: Engine) -> bool:
    """With `overlap_comm`, on an accelerator that has streams; test_overlap.py says which all-gather runs on which."""
    with accelerator_with_streams() as accelerator:
        model = tiny.token_loss_model()
        config = tiny.deepspeed_config()
        config["zero_optimization"]["overlap_comm"] = True
        other = Engine(model, build_optimizer(model, step_runs.make_recipe().optimizer), config)
        offload = other.optimizer.parameter_offload
        streams = [
            offload._DeepSpeedZeRoOffload__allgather_stream,
            offload.get_param_coordinator()._PartitionedParameterCoordinator__allgather_stream,
            other.optimizer.reduce_and_partition_stream,
        ]
        other.close()
        return streams[0] is streams[1] and len({*streams, accelerator.default_stream()}) == 3


def a_shard_is_a_chunk_of_the_flat_parameter(e: Engine) -> bool:
    unsharded = dict(tiny.token_loss_model().named_parameters())
    return all(
        torch.equal(
            e.shards.shard(e.shards.masters(), parameter)[: e.shards.numel(parameter)],
            # `Shard(0)` of a DTensor is torch.chunk's part; of a small tensor the last ranks may have none.
            [*unsharded[name].detach().flatten().chunk(layout.size("shards")), torch.empty(0)][layout.rank("shards")],
        )
        for name, parameter in e.trainable
    )


def groups_have_the_recipes_timeout(e: Engine) -> bool:
    start_process_group(10, expert=2)
    groups = [e.optimizer.dp_process_group, layout.group("tensor"), layout.group("expert_shards")]
    start_process_group(10)
    limits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    return torch.distributed.group.WORLD not in groups and set(limits) == {timedelta(minutes=10)}


def muons_functions_are_not_compiled(e: Engine) -> bool:
    from deepspeed.runtime.zero.muon import original_muon

    def is_compiled(function: object) -> bool:
        return hasattr(function, "_torchdynamo_orig_callable")

    functions = (original_muon.zeropower_via_newtonschulz5, original_muon.zeropower_via_gram_newtonschulz)
    return is_compiled(torch.compile(compute_loss)) and not any(is_compiled(function) for function in functions)


def a_backward_starts_no_program_to_count_devices(e: Engine) -> bool:
    """numactl is a PermissionError where PATH has a folder without permission."""
    numa.get_numa_cores = None
    accumulate(e)
    return True


def norms_are_taken_in_the_dtype_of_a_global(e: Engine) -> bool:
    accumulate(e)
    norm = e.gradient_norm()
    with patch.object(stage3, "get_norm_dtype", Mock(return_value=torch.float32)) as get_dtype:
        in_fp32 = e.step(1e-3)
    return get_dtype.called and abs(in_fp32 - norm) < 1e-6 * norm


def an_update_reads_the_gradient_in_its_buffer_and_clips_it(e: Engine) -> bool:
    """The same update as DeepSpeed's, which copies the gradient and multiplies it, but for rounding."""
    step, results, names = torch.optim.AdamW.step, [], ("_prepare_fp32_grad_for_sub_group", "unscale_and_clip_grads")
    pairs = [(make_engine(), (DEEPSPEED_PREPARE, DEEPSPEED_CLIP)), (e, (update_from_buffer, clip_in_update))]
    for engine, functions in pairs:
        in_buffer: list[bool] = []

        def watch(optimizer, *more, zero=engine.optimizer, in_buffer=in_buffer):
            buffer = zero.grad_partitions_flat_buffer.untyped_storage().data_ptr()
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            in_buffer += [gradient.untyped_storage().data_ptr() == buffer for gradient in gradients]
            return step(optimizer, *more)

        replaced = dict(zip(names, functions, strict=True))
        with patch.multiple(stage3.DeepSpeedZeroOptimizer_Stage3, **replaced), patch("torch.optim.AdamW.step", watch):
            for seed in range(2):
                accumulate(engine, seed)
                engine.optimizer.clip_grad = engine.gradient_norm() / 3
                engine.step(1e-2)
        results.append((in_buffer, engine.shards.masters(), engine.shards.optimizer_state("exp_avg_sq")))
    (theirs, *expected), (ours, *updated) = results
    pairs[0][0].close()
    both = [(torch.cat(a), torch.cat(b)) for a, b in zip(updated, expected, strict=True)]
    close = [float((a - b).abs().max()) < 1e-6 * float(b.abs().max()) for a, b in both]
    return not all(theirs) and all(ours) and all(close)  # DeepSpeed copies where a sub-group has several parameters


CHECKS: list[Callable[[Engine], bool]] = [
    the_shard_is_the_cast_of_the_master,
    a_changed_shard_is_read_only_after_the_cache_is_emptied,
    a_layer_is_a_leaf_with_identity_functions,
    all_gathers_and_reductions_use_the_streams_that_are_waited_for,
    a_shard_is_a_chunk_of_the_flat_parameter,
    groups_have_the_recipes_timeout,
    muons_functions_are_not_compiled,
    a_backward_starts_no_program_to_count_devices,
    norms_are_taken_in_the_dtype_of_a_global,
    an_update_reads_the_gradient_in_its_buffer_and_clips_it,
]


def run_checks() -> dict[str, bool]:
    results = {}
    for check in CHECKS:
        e = make_engine(bf16=check is the_shard_is_the_cast_of_the_master)
        results[check.__name__] = check(e)
        e.close()
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, bool]]:
    return run_ranks(run_checks, 2)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_deepspeed_behaves_as_docs_zero3_describes(results, name):
    assert all(result[name] for result in results), f"{name}: {results}"


@pytest.mark.parametrize("num_groups", [1, 2])
def test_gathered_parameters_are_copied_as_deepspeed_copies_them(num_groups: int) -> None:
    """Shapes that the ranks divide evenly and unevenly, one with fewer elements than ranks, another dtype of the
    parameter than of the buffer, and shards of a second copy, which hold those of several groups."""
    num_ranks, shapes = 4, [(8, 3), (5, 5), (3,), (1, 7)]

    def gather(wait: Callable[..., None]) -> tuple[list[torch.Tensor], bool]:
        parameters = []
        for i, shape in enumerate(shapes):
            numel = torch.Size(shape).numel()
            shard = SimpleNamespace(
                ds_numel=-(-numel // (num_ranks * num_groups)), dtype=torch.float64 if i == 1 else torch.float32
            )
            sizes = dict(ds_numel=numel, ds_shape=torch.Size(shape), ds_secondary_tensor_num_of_groups=num_groups)
            parameters.append(SimpleNamespace(ds_status=ZeroParamStatus.INFLIGHT, ds_tensor=shard, data=None, **sizes))
        numel_per_rank = sum(parameter.ds_tensor.ds_numel * num_groups for parameter in parameters)
        buffer = torch.arange(3.0 + num_ranks * numel_per_rank)[3:]  # not at the beginning of its storage
        parts = [buffer.narrow(0, numel_per_rank * i, numel_per_rank) for i in range(num_ranks)]
        handle = AllGatherCoalescedHandle(
            SimpleNamespace(wait=lambda: None), parameters, parts, num_ranks, use_secondary_tensor=num_groups > 1
        )
        wait(handle)
        wait(handle)  # no effect once it is complete
        available = all(parameter.ds_status == ZeroParamStatus.AVAILABLE for parameter in parameters)
        return [parameter.data for parameter in parameters], available and handle.complete

    expected, _ = gather(DEEPSPEED_WAIT)
    copied, complete = gather(copy_gathered_parameters)
    assert complete
    for ours, theirs in zip(copied, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.is_contiguous() and torch.equal(ours, theirs)
