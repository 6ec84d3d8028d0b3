"""The batch arithmetic: what it plans, what it refuses, and that every remedy it names works."""

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.recipes import smallest_recipe
from vcore_ds.commands.plan.prediction import LengthModel, simulate, summarize_batches
from vcore_ds.config.problems import RecipeError
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.batch_layout import Utilization
from vcore_ds.planning.batch_plan import BatchKind, BatchPlan, plan_batch
from vcore_ds.planning.known_models import QWEN3_32B
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import CPU, H100, TimeModel
from vcore_ds.planning.settings import derive_plan_settings


def plan(ranks: int, shape: ModelShape = QWEN3_32B, **sections: dict[str, Any]) -> BatchPlan:
    return plan_batch(derive_plan_settings(Recipe.model_validate(smallest_recipe() | sections)), ranks, shape)


def use_ranks(batch_plan: BatchPlan) -> dict[BatchKind, Utilization]:
    return summarize_batches(simulate(batch_plan, 16_384, LengthModel()))


def test_a_plan_has_the_sizes_of_the_recipe() -> None:
    assert plan(2, batch={"micro_batch_size_per_rank": 2}) == BatchPlan(
        num_ranks=2,
        global_batch_size=32,
        micro_batch_size_per_rank=2,
        pack_tokens_per_rank=None,
        num_trusted_global=0,
        probe_batch_size_global=4,
        probe_micro_batch_size_per_rank=2,
        utility_micro_batch_size_per_rank=2,
        main_parallel_sizes=(1, 2),
        probe_parallel_sizes=(1, 2),
        time_model=TimeModel(QWEN3_32B, 2, 2, H100),
    )
    assert plan(2, probe={"micro_batch_size_per_rank": 1}).probe_micro_batch_size_per_rank == 1
    both = plan(2, batch={"micro_batch_size_per_rank": 2}, utility={"micro_batch_size_per_rank": 7})
    assert (both.utility_micro_batch_size_per_rank, both.batches_per_utility_pass) == (7, 3)
    trusted = {"train_path": "a", "probe_path": "b", "trusted_share": 0.29}  # times 100: 28.999999999999996
    assert plan(2, batch={"global_size": 100}, data=trusted).num_trusted_global == 29
    recipe = Recipe.model_validate(smallest_recipe())
    on_four_a_node = plan_batch(derive_plan_settings(recipe), 16, QWEN3_32B, ranks_per_node=4, machine=CPU)
    assert on_four_a_node.time_model == TimeModel(QWEN3_32B, 16, 4, CPU)


def test_the_time_model_chooses_the_micro_batch_size_unless_it_changes_the_result() -> None:
    chosen = plan(2)
    sizes = chosen.micro_batch_size_per_rank, chosen.probe_micro_batch_size_per_rank
    assert (*sizes, chosen.utility_micro_batch_size_per_rank, chosen.batches_per_utility_pass) == (None, None, None, 1)
    assert chosen.may_pack and "short ones packed" in chosen.describe()
    for changes in (
        {"unpackable": "whose layers (conv) mix tokens"},
        {"no_sequence_parallelism": "whose attention is its own"},
    ):
        unpacked_plan = plan(2, replace(QWEN3_32B, **changes))
        assert not unpacked_plan.may_pack and "those of similar length in a micro-batch" in unpacked_plan.describe()
    assert not plan(2, model={"path": "none", "attention": "sdpa"}).may_pack  # it would need a mask of the whole pack
    assert chosen.lay_out_main(range(4), [100] * 4).is_packed and chosen.lay_out_probe(range(4), [100] * 4).is_packed
    assert not chosen.lay_out_main(range(4), [100] * 4, micro_batch_size=2).is_packed
    assert plan(2, probe={"micro_batch_size_per_rank": 3}).probe_micro_batch_size_per_rank == 3
    assert plan(2, batch={"pack_tokens_per_rank": 16384}).micro_batch_size_per_rank == 1
    micro_batch_alpha = {"kl_budget": 0.05, "alpha_scope": "micro_batch"}
    assert plan(2, method=micro_batch_alpha).micro_batch_size_per_rank == 1


def test_describe_puts_the_plan_into_a_sentence() -> None:
    line = plan(2, batch={"micro_batch_size_per_rank": 2}).describe()
    assert line == "32 sequences a step on 2 ranks, 2 in a micro-batch; probe 4"
    packed = {"pack_tokens_per_rank": 16384, "global_size": 1}
    assert plan(1, batch=packed, method={"name": "sft"}).describe() == (
        "1 sequence a step on 1 rank, in packs of at most 16,384 tokens a rank"
    )


def test_sft_has_no_probe() -> None:
    sft = plan(8, method={"name": "sft"}, probe={"sequence_parallel": 5})
    assert (sft.probe_batch_size_global, sft.probe_parallel_sizes) == (0, (1,))


def test_parallel_sizes_divide_the_ranks_and_heads() -> None:
    assert plan(64).main_parallel_sizes == (1, 2, 4, 8, 16, 32, 64)
    fixed = plan(64, batch={"sequence_parallel": 4}, probe={"sequence_parallel": 16})
    assert (fixed.main_parallel_sizes, fixed.probe_parallel_sizes, fixed.sequence_parallel_sizes) == (
        (4,),
        (16,),
        [4, 16],
    )
    without_ulysses = replace(QWEN3_32B, no_sequence_parallelism="whose attention cannot be replaced")
    assert plan(64, without_ulysses).sequence_parallel_sizes == [1]
    assert plan(64, without_ulysses, batch={"sequence_parallel": 1}).main_parallel_sizes == (1,)
    assert plan(64, model={"path": "m", "attention": "eager"}).sequence_parallel_sizes == [1]


@pytest.mark.parametrize(
    ("ranks", "shape", "sections", "key", "sizes"),
    [
        (64, QWEN3_32B, {"batch": {"sequence_parallel": 6}}, "batch", "1, 2, 4, 8, 16, 32, 64"),
        (48, replace(QWEN3_32B, num_heads=40), {"probe": {"sequence_parallel": 16}}, "probe", "1, 2, 4, 8"),
        (4, replace(QWEN3_32B, is_assumed=True), {"batch": {"sequence_parallel": 3}}, "batch", "1, 2, 4"),
        (
            4,
            replace(QWEN3_32B, no_sequence_parallelism="whose attention cannot be replaced"),
            {"batch": {"sequence_parallel": 2}},
            "batch",
            "1",
        ),
        (4, QWEN3_32B, {"batch": {"sequence_parallel": 2}, "model": {"path": "m", "attention": "sdpa"}}, "batch", "1"),
    ],
)
def test_a_parallel_size_that_does_not_fit_is_refused(
    ranks: int, shape: ModelShape, sections: dict[str, Any], key: str, sizes: str
) -> None:
    found = sections[key]["sequence_parallel"]
    with pytest.raises(RecipeError) as error:
        plan(ranks, shape, **sections)
    assert str(error.value).startswith(f"{key}.sequence_parallel: found {found} ")
    assert str(error.value).endswith(f"expected auto or one of {sizes}")


def test_packing_is_refused_where_layers_mix_sequences() -> None:
    shape = replace(QWEN3_32B, unpackable="whose layers (conv) are not all attention")
    assert plan(4, shape, batch={"pack_tokens_per_rank": None}).pack_tokens_per_rank is None
    with pytest.raises(RecipeError, match=r"pack_tokens_per_rank: found 16384 .* \(conv\)"):
        plan(4, shape, batch={"pack_tokens_per_rank": 16384})


def test_rope_beyond_its_limit_needs_one_sequence_per_forward() -> None:
    """Above the limit of its rotary embedding, every forward of training, probe and utilities is one sequence."""
    shape = replace(QWEN3_32B, rope="longrope", rope_limit=4096)

    def plan_with_cutoff(cutoff: int, **sections: Any) -> BatchPlan:
        return plan(4, shape, data={"train_path": "data.jsonl", "cutoff_length": cutoff}, **sections)

    short, long = plan_with_cutoff(4096), plan_with_cutoff(4097)
    assert short.may_pack and short.sequence_parallel_sizes == [1, 2, 4]
    assert not long.may_pack and not long.is_packed and long.sequence_parallel_sizes == [1]
    sizes = long.micro_batch_size_per_rank, long.probe_micro_batch_size_per_rank, long.utility_micro_batch_size_per_rank
    assert sizes == (1, 1, 1) and long.batches_per_utility_pass == 1
    lengths = [100, 5000, 100, 100, 300]
    assert all(len(ids) <= 1 for groups in long.lay_out_main(range(5), lengths).micro_steps for ids in groups)
    assert plan_with_cutoff(4096, batch={"pack_tokens_per_rank": 4096}).is_packed
    with pytest.raises(RecipeError, match=r"pack_tokens_per_rank: found 4097 .* \(longrope\)"):
        plan_with_cutoff(4097, batch={"pack_tokens_per_rank": 4097})
    for section in ("batch", "probe", "utility"):
        match = rf"{section}.micro_batch_size_per_rank: found 2 .* expected 1, or data.cutoff_length of at most 4096"
        with pytest.raises(RecipeError, match=match):
            plan_with_cutoff(
                4097, **({"batch": {"micro_batch_size_per_rank": 1}} | {section: {"micro_batch_size_per_rank": 2}})
            )
    with pytest.raises(RecipeError, match=r"data.cutoff_length: found 4097 .* sequences of earlier forwards"):
        plan(4, replace(shape, rope="dynamic"), data={"train_path": "data.jsonl", "cutoff_length": 4097})


def test_a_model_of_unknown_shape_may_have_any_number_of_heads() -> None:
    assert plan(28, replace(QWEN3_32B, is_assumed=True), batch={"sequence_parallel": 7}).main_parallel_sizes == (7,)


def test_the_longest_sequence_needs_a_pack_that_holds_it() -> None:
    """The numbers that the message names work, and those beside them do not."""
    long = {"cutoff_length": 100_000, "train_path": "data.jsonl"}
    packed = {"pack_tokens_per_rank": 16_384}
    with pytest.raises(RecipeError, match="expected 25000 or more, or data.cutoff_length 65536 or less"):
        plan(4, batch=packed, data=long)
    assert plan(4, batch={"pack_tokens_per_rank": 25_000}, data=long).is_packed
    assert plan(4, batch=packed, data=long | {"cutoff_length": 65_536}).is_packed
    for batch, data in (({"pack_tokens_per_rank": 24_999}, long), (packed, long | {"cutoff_length": 65_537})):
        with pytest.raises(RecipeError):
            plan(4, batch=batch, data=data)
    with pytest.raises(RecipeError, match="probe.sequence_parallel divides a pack among at most 4 ranks"):
        plan(8, batch=packed, data=long, probe={"sequence_parallel": 4})


def test_the_remedy_for_idle_ranks_helps() -> None:
    packed, size = {"pack_tokens_per_rank": 16_384}, {"global_size": 4}
    fixed = plan(64, batch=packed | {"sequence_parallel": 1})
    assert use_ranks(fixed)["main"].is_low
    assert fixed.describe_warning("main").endswith("set batch.sequence_parallel to auto")
    assert not use_ranks(plan(64, batch=packed))["main"].is_low

    odd = plan(63, batch=packed | size)  # no parallel size but 1
    assert use_ranks(odd)["main"].is_low
    assert odd.describe_warning("main").endswith("set batch.global_size to 504 or more, or use fewer ranks")
    assert not use_ranks(plan(63, batch=packed | {"global_size": 504}))["main"].is_low
    assert "set probe.batch_size to 504 or more" in plan(63, batch=packed).describe_warning("probe")

    single = plan(4, batch={"micro_batch_size_per_rank": 2})
    assert "set batch.pack_tokens_per_rank to data.cutoff_length" in single.describe_warning("main")


def test_a_simulation_covers_the_batches_of_the_recipe() -> None:
    assert use_ranks(plan(8)).keys() == {"main", "probe"}
    assert use_ranks(plan(8, method={"name": "sft"})).keys() == {"main"}
    assert use_ranks(plan(8, batch={"global_size": 2**31 - 1})).keys() == {"probe"}
