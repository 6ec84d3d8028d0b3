"""The DeepSpeed behaviour that docs/zero3.md relies on, one test per row, so that an upgrade that changes one is named."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_grad, z3_leaf_module

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.distributed import layout
from vcore_ds.engine import Engine, checkpoint_shards

pytestmark = pytest.mark.dist


def engine(bf16: bool = False, **kwargs) -> Engine:
    recipe = step_runs.recipe(model={"path": "none", "precision": "bf16" if bf16 else "fp32"})
    return step_runs.make_engine(tiny.token_loss_model(), recipe, persistence_threshold=500, **kwargs)


def loss_on(e: Engine, seed: int = 0) -> torch.Tensor:
    return e.token_losses(step_runs.deal(tiny.rows(4, seed=seed), 2)[0]).mean()


def weight(e: Engine):
    return dict(e.trainable)["causal_lm.model.layers.0.mlp.up_proj.weight"]


def local_gradient_is_the_rank_average_and_stays(e: Engine) -> bool:
    loss = loss_on(e)
    e.deepspeed.set_gradient_accumulation_boundary(True)
    e.deepspeed.backward(loss, scale_wrt_gas=False)
    first = safe_get_local_grad(weight(e)).clone()
    with e.without_gradient():
        loss_on(e, seed=1)
    stays = torch.equal(first, safe_get_local_grad(weight(e)))
    e.optimizer.zero_grad()
    with e.accumulation(1):  # ours sums over ranks
        e.backward(loss_on(e))
    return stays and torch.allclose(safe_get_local_grad(weight(e)), first * layout.size("shards"), rtol=1e-5)


def cast_of_the_master_is_the_shard(e: Engine) -> bool:
    for k in range(2):
        with e.accumulation(1):
            e.backward(loss_on(e, seed=k))
        e.step(1e-2)
    return all(
        torch.equal(safe_get_local_fp32_param(p).detach().view(-1).to(p.dtype), p.ds_tensor.data.view(-1))
        for _, p in e.trainable
    )


def the_optimizer_counts_its_steps_and_keeps_local_moments(e: Engine) -> bool:
    none_yet = e.num_updates == 0 and not e.optimizer.optimizer.state
    counts, moment = [], torch.zeros(e.local_numel(weight(e)))
    for k in range(2):
        with e.accumulation(1):
            e.backward(loss_on(e, seed=k))
        clipped = e.local_gradient(weight(e)) * min(1.0, 1.0 / e.gradient_norm())  # the recipe's gradient_clipping
        moment = 0.9 * moment + 0.1 * clipped
        e.step(1e-3)
        counts.append(e.num_updates)
    same = torch.allclose(e.local_optimizer_state(weight(e), "exp_avg"), moment, rtol=1e-5, atol=1e-9)
    return none_yet and counts == [1, 2] and same


def a_changed_shard_is_read_only_after_the_cache_is_emptied(e: Engine) -> bool:
    with e.accumulation(1):  # from the first backward on, ZeRO-3 knows what is used again and keeps it
        e.backward(loss_on(e))
    with e.without_gradient():
        before = loss_on(e)
        shard = dict(e.trainable)["causal_lm.model.norm.weight"].ds_tensor.data  # small, so it is never released
        kept = shard.clone()
        shard.mul_(3.0)
        stale = loss_on(e)
        e.optimizer.empty_partition_cache()
        fresh = loss_on(e)
        shard.copy_(kept)
        e.optimizer.empty_partition_cache()
        after = loss_on(e)
    # Stale reads are the reason for `forget_gathered_parameters`; if they end, it can go.
    return torch.equal(stale, before) and not torch.equal(fresh, before) and torch.equal(after, before)


def zero_grad_resets_overwrite_or_add(e: Engine) -> bool:
    def gradient(reset: bool) -> torch.Tensor:
        if reset:
            e.optimizer.zero_grad()
        e.deepspeed.set_gradient_accumulation_boundary(True)
        e.deepspeed.backward(loss_on(e), scale_wrt_gas=False)
        return safe_get_local_grad(weight(e)).clone()

    once, twice, again = gradient(True), gradient(False), gradient(True)
    return torch.allclose(twice, 2 * once, rtol=1e-5) and torch.allclose(again, once, rtol=1e-5)


def a_non_finite_gradient_is_not_applied_and_said_so(e: Engine) -> bool:
    before = [p.ds_tensor.data.clone() for _, p in e.trainable]
    with e.accumulation(1):
        e.backward(loss_on(e))
    safe_get_local_grad(weight(e))[:1] = torch.nan
    e.deepspeed.step()
    same = all(torch.equal(a, p.ds_tensor.data) for a, (_, p) in zip(before, e.trainable, strict=True))
    return same and bool(e.optimizer.overflow)


def a_layer_is_a_leaf_with_identity_functions(e: Engine) -> bool:
    layer = e.module.layers[0]
    wrappers = [layer.__dict__.get(name) for name in ("pre_bwd_fn", "post_bwd_fn")]
    x = torch.randn(3)
    return z3_leaf_module(layer) and all(torch.equal(f.apply(x), x) for f in wrappers)


def a_later_hook_sees_the_gathered_parameter(e: Engine) -> bool:
    seen = []
    handle = e.module.layers[0].mlp.up_proj.register_forward_pre_hook(
        lambda module, _: seen.append(tuple(module.weight.shape))
    )
    with e.without_gradient():
        loss_on(e)
    handle.remove()
    return seen == [(64, 32)]


def the_optimizers_own_shards_are_reached_without_a_copy(e: Engine) -> bool:
    with e.accumulation(1):
        e.backward(loss_on(e))
    e.step(1e-3)
    parameter, shards = weight(e), []
    for key in (None, "exp_avg", "exp_avg_sq"):
        shard, group = e.optimizer._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=False, optim_state_key=key
        )
        shards.append(shard.detach())
    flat = e.optimizer.fp32_partitioned_groups_flat[group]
    own = [flat, *(e.optimizer.optimizer.state[flat][key] for key in ("exp_avg", "exp_avg_sq"))]
    before = e.optimizer.grad_position[e.optimizer.get_param_id(parameter)]
    return before[0] == group and all(
        shard.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        and shard.numel() == parameter.ds_tensor.numel()
        for shard, whole in zip(shards, own, strict=True)
    )


def a_step_without_gradient_and_rate_makes_the_state_and_moves_nothing(e: Engine) -> bool:
    before = [flat.detach().clone() for flat in e.optimizer.fp32_partitioned_groups_flat]
    checkpoint_shards._make_optimizer_state(e)
    states = [e.optimizer.optimizer.state[flat] for flat in e.optimizer.fp32_partitioned_groups_flat]
    return (
        all(torch.equal(a, b) for a, b in zip(before, e.optimizer.fp32_partitioned_groups_flat, strict=True))
        and all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in states)
        and not any(state[key].any() for state in states for key in ("exp_avg", "exp_avg_sq"))
        and e.num_updates == 1  # which is why the count is set afterwards
    )


def a_shard_is_a_chunk_of_the_flat_parameter(e: Engine) -> bool:
    whole = dict(tiny.token_loss_model().named_parameters())
    return all(
        torch.equal(
            e.local_master(parameter),
            # `Shard(0)` of a DTensor is torch.chunk's part; of a small tensor the last ranks may have none.
            [*whole[name].detach().flatten().chunk(layout.size("shards")), torch.empty(0)][layout.rank("shards")],
        )
        for name, parameter in e.trainable
    )


CHECKS: list[Callable[[Engine], bool]] = [
    local_gradient_is_the_rank_average_and_stays,
    cast_of_the_master_is_the_shard,
    the_optimizer_counts_its_steps_and_keeps_local_moments,
    a_changed_shard_is_read_only_after_the_cache_is_emptied,
    zero_grad_resets_overwrite_or_add,
    a_non_finite_gradient_is_not_applied_and_said_so,
    a_layer_is_a_leaf_with_identity_functions,
    a_later_hook_sees_the_gathered_parameter,
    the_optimizers_own_shards_are_reached_without_a_copy,
    a_step_without_gradient_and_rate_makes_the_state_and_moves_nothing,
    a_shard_is_a_chunk_of_the_flat_parameter,
]


def run_checks() -> dict[str, bool]:
    results = {}
    for check in CHECKS:
        e = engine(bf16=check is cast_of_the_master_is_the_shard)
        results[check.__name__] = check(e)
        e.close()
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, bool]]:
    return run_ranks(run_checks, 2)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_deepspeed_still_behaves(results, name):
    assert all(of_rank[name] for of_rank in results), f"{name}: {results}"
