"""The estimated memory of a rank: parameters, known totals, the comparison with what a rank has, remedies."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.recipes import smallest_recipe
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import load_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import EngineConfig, LoraConfig
from vcore_ds.distributed import device
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.models import attention
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.dropout import TokenDropout
from vcore_ds.planning import fit
from vcore_ds.planning.batch_layout import Utilization, Waste
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.fit import Available, MemoryPlan, choose_activations, describe_shortage, plan_memory
from vcore_ds.planning.known_models import KNOWN_MODELS, QWEN3_32B, parse_shape
from vcore_ds.planning.memory import MemoryEstimate, estimate_memory, estimate_unsharded_gradients
from vcore_ds.planning.model_shape import ModelShape, layer_parameters
from vcore_ds.planning.passes import ParameterCounts, parameter_counts
from vcore_ds.planning.settings import (
    DEFAULT_LOSS_MEMORY,
    ActivationMemory,
    LossMemory,
    MemorySettings,
    ZeroSettings,
    derive_plan_settings,
)
from vcore_ds.training.start_checks import check_memory, find_available_memory

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "launch_scripts" / "recipes" / "qwen3_32b_math_full.yaml"
GIB = 2**30
H100 = Available(device=79 * GIB, host=180 * GIB)
OFFLOADED = ZeroSettings(offloads_optimizer=True)
FULL = MemorySettings(
    num_ranks=8, main_tokens=16384, probe_tokens=16384, utility_tokens=16384, estimator="jvp", is_checkpointed=True
)


def make_shape(layers: int, hidden: int, heads: int, width: int, *, tied: bool, vocabulary: int = 151936, norms=True):
    return ModelShape(
        layers, heads, 8, 128, layer_parameters(hidden, heads, 8, 128, width), hidden_size=hidden,
        intermediate_size=width, vocabulary_size=vocabulary, is_tied=tied, normalizes_heads=norms,
    )  # fmt: skip


@pytest.mark.parametrize("num_ranks, gigabytes", [(8, 81.9), (16, 41.0), (64, 10.2)])
def test_full_vcore_keeps_20_bytes_for_each_parameter(num_ranks: int, gigabytes: float) -> None:
    kept = dict(estimate_memory(QWEN3_32B, replace(FULL, num_ranks=num_ranks)).persistent)
    del kept["reduction buffer"]
    assert sum(kept.values()) / 1e9 == pytest.approx(gigabytes, abs=0.06)
    without = estimate_memory(QWEN3_32B, replace(FULL, num_ranks=num_ranks, estimator=None, optimizer="sgd"))
    assert {"direction", "moments"}.isdisjoint(without.persistent) and "probe" not in without.phases


SMALL, SMALL_LORA = make_shape(2, 1024, 16, 3072, tied=True), LoraConfig(rank=8, alpha=8)
SMALL_VOCABULARY = make_shape(2, 1024, 16, 3072, tied=True, vocabulary=512)


def test_asft_has_logits_and_hidden_states_of_two_models() -> None:
    settings = MemorySettings(num_ranks=8, main_tokens=2048, lora=SMALL_LORA, is_checkpointed=True)
    loss, anchored = (
        estimate_memory(SMALL, replace(settings, is_anchored=is_anchored)).phases["main"]["loss"]
        for is_anchored in (False, True)
    )
    assert anchored - loss == 2 * 256 * 2**20 + 2 * 2048 * 2 * 1024


@pytest.mark.parametrize(("lora", "num_bytes"), [(None, 2 + 4), (SMALL_LORA, 4)])
def test_unsharded_gradients_have_an_fp32_sum_beside_those_in_16_bits(lora: LoraConfig | None, num_bytes: int) -> None:
    """The gradients of adapters are in fp32 themselves."""
    settings = MemorySettings(num_ranks=8, main_tokens=2048, lora=lora, is_checkpointed=True)
    each, once = (
        estimate_memory(SMALL, replace(settings, coalesces_gradients=coalesces)).phases["main"]["whole gradients"]
        for coalesces in (False, True)
    )
    counts = parameter_counts(SMALL, lora)
    assert once - each == num_bytes * counts.trained
    # A shard of frozen parameters in 16 bits, and one of those that are trained.
    frozen = -(-(counts.all - counts.trained) // 8)
    shard = 2 * frozen + (2 if lora is None else 4) * -(-counts.trained // 8)
    assert estimate_memory(SMALL, settings).persistent["parameters"] == shard


def test_muon_has_one_moment_of_the_layers_matrices_and_two_of_the_rest() -> None:
    muon = replace(FULL, optimizer="muon")
    in_layers = 64 * QWEN3_32B.layer_parameters
    for num_ranks in (8, 7):  # shards of equal size: seven have padding
        adam, one = (estimate_memory(QWEN3_32B, replace(x, num_ranks=num_ranks)).persistent_bytes for x in (FULL, muon))
        assert adam - one == 4 * -(-in_layers // num_ranks)
    largest = 2 * (6 * 25600 * 5120 + 3 * 5120**2)
    assert estimate_memory(QWEN3_32B, muon).phases["step"]["a matrix of Muon"] == largest
    # Orthogonalized on the device all the same.
    offloaded = estimate_memory(QWEN3_32B, replace(muon, zero=OFFLOADED))
    assert offloaded.transient_bytes("step") == largest and offloaded.host["moments"] > 0


def test_factors_of_the_direction_are_kept_and_no_tangent_is_gathered() -> None:
    full, low_rank = estimate_memory(QWEN3_32B, FULL), estimate_memory(QWEN3_32B, replace(FULL, probe_rank=64))
    in_layer = 64 * (2 * (8192 + 5120) + 2 * (1024 + 5120) + 3 * (25600 + 5120))
    assert low_rank.persistent["factors of the direction"] == 2 * (64 * in_layer + 2 * 64 * (151_936 + 5_120))
    shard = full.persistent["direction"]
    saved = full.persistent_bytes - low_rank.persistent_bytes
    assert saved == shard - low_rank.persistent["factors of the direction"] and "direction" not in low_rank.persistent
    # The shard exists after the probe's backward, which takes more.
    assert low_rank.phases["probe"] == full.phases["probe"]
    few = estimate_memory(QWEN3_32B, replace(FULL, probe_rank=64, num_ranks=1))
    in_fp32 = 4 * 151_936 * 5_120
    assert few.phases["probe"] == {
        "direction before it is factorized": few.persistent["parameters"], "matrices that are factorized": in_fp32
    }  # fmt: skip
    assert few.peak_phase == "probe" and few.phases["step"] == {}
    few_tokens = replace(FULL, probe_rank=64, num_ranks=1, probe_tokens=8)
    in_a_layer = estimate_memory(SMALL_VOCABULARY, few_tokens).phases["probe"]
    assert in_a_layer["matrices that are factorized"] == 4 * SMALL_VOCABULARY.layer_parameters
    staged = replace(FULL, stages_checkpoints=True)
    with_direction = estimate_memory(QWEN3_32B, replace(staged, probe_rank=64, keeps_direction=True))
    copied = with_direction.host_bytes - estimate_memory(QWEN3_32B, staged).host_bytes
    assert copied == low_rank.persistent["factors of the direction"]
    assert low_rank.phases["utility"]["tangents of the parameters"] == 0
    assert low_rank.transient_bytes("utility") < full.transient_bytes("utility")


def test_a_rank_keeps_the_factors_of_its_experts() -> None:
    moe = KNOWN_MODELS["Qwen3-30B-A3B"]
    experts = moe.experts
    assert experts is not None
    kept = [
        estimate_memory(moe, replace(FULL, probe_rank=16, expert=n)).persistent["factors of the direction"]
        for n in (1, 8)
    ]
    elsewhere = 3 * experts.num_layers * experts.num_experts * 7 // 8
    assert kept[0] - kept[1] == 2 * 16 * elsewhere * (experts.width + moe.hidden_size)
    # Nor has it gradients of the others, in 16 bits and summed in fp32.
    gradients = [estimate_unsharded_gradients(moe, replace(FULL, expert=n), parameter_counts(moe)) for n in (1, 8)]
    assert gradients[0] - gradients[1] == (2 + 4) * elsewhere * experts.width * moe.hidden_size


def test_peaks_of_the_largest_model() -> None:
    """22 and 12 GB were counted operation by operation, on the meta device and without copies of gathered weights."""
    estimate = estimate_memory(QWEN3_32B, FULL)
    assert estimate.transient_bytes("main") / 1e9 == pytest.approx(22, rel=0.15)
    assert estimate.transient_bytes("utility") / 1e9 == pytest.approx(12, rel=0.2)
    assert estimate.peak_phase == "main"
    assert estimate.peak_bytes == estimate.persistent_bytes + estimate.transient_bytes("main")
    assert estimate.margin_bytes == 2**30 + int(0.05 * estimate.peak_bytes)
    copied = estimate_memory(QWEN3_32B, replace(FULL, zero=ZeroSettings(ranks_of_second_copy=4))).persistent
    assert copied["second copy of the parameters"] == 2 * -(-parameter_counts(QWEN3_32B).all // 4)


def test_parameters_of_a_tensor_parallel_shard_by_hand() -> None:
    """Qwen3-32B sharded over 8 ranks: norms are replicated, and so is one factor of each adapter."""
    part = QWEN3_32B.take_tensor_shard(8)
    linear, embedding, norms = 64 * 487_587_840 // 8, 151_936 // 8 * 5_120, 64 * (2 * 5_120 + 2 * 128) + 5_120
    base = linear + 2 * embedding + norms
    assert parameter_counts(part) == ParameterCounts(base, base)
    odd = replace(QWEN3_32B, vocabulary_size=151_937).take_tensor_shard(8)
    assert odd.vocabulary_size == 18_993  # with padding


def test_tensor_parallel_ranks_hold_full_hidden_states_at_exchanges() -> None:
    """16,384 tokens of a group of 8: checkpoints of 2,048 on each rank, hidden states of all of them at the loss."""
    part = QWEN3_32B.take_tensor_shard(8)
    settings = replace(FULL, tensor=8, num_ranks=4, estimator=None, probe_tokens=0, utility_tokens=0)
    hidden, width = 16_384 * 5_120, 25_600 // 8
    assert estimate_memory(part, settings).phases["main"]["activation checkpoints"] == 2 * hidden // 8 * 65
    main = estimate_memory(part, replace(settings, is_checkpointed=False)).phases["main"]
    # A block of logits, its bf16 copy, three copies of the hidden states, and the gradient of the head's shard twice.
    assert main["loss"] == 2**28 + 2**27 + 3 * 2 * hidden + 6 * 18_992 * 5_120
    difference = replace(settings, utility_tokens=16_384, estimator="finite_difference")
    # Without a gradient those of all tokens and of the supervised ones, and the copy of the block in logsumexp.
    assert estimate_memory(part, difference).phases["utility"]["loss"] == 2**28 + 2**28 + 2 * 2 * hidden
    four = estimate_memory(part, replace(difference, utility_tokens=4 * 16_384)).phases["utility"]
    assert four["a layer's forward"] == 4 * 2 * (4 * hidden // 8 + hidden + 4 * 16_384 * width)


def test_settings_raise_or_lower_the_estimate() -> None:
    base = estimate_memory(QWEN3_32B, FULL)
    for changed in (
        dict(num_ranks=16), dict(main_tokens=8192, probe_tokens=8192), dict(offloads_checkpoints=True),
        dict(zero=OFFLOADED), dict(lora=LoraConfig(rank=8, alpha=8)),
    ):  # fmt: skip
        assert estimate_memory(QWEN3_32B, replace(FULL, **changed)).peak_bytes < base.peak_bytes, changed
    for changed in (dict(is_checkpointed=False), dict(number_bytes=4), dict(zero=ZeroSettings(ranks_of_second_copy=8))):
        assert estimate_memory(QWEN3_32B, replace(FULL, **changed)).peak_bytes > base.peak_bytes, changed
    offloaded = estimate_memory(QWEN3_32B, replace(FULL, zero=replace(OFFLOADED, offloads_parameters=True)))
    assert set(offloaded.persistent) == {"direction", "reduction buffer"}
    assert set(offloaded.host) == {"parameters", "gradients", "master weights", "moments"}


def test_pinned_host_memory_is_rounded_up_to_powers_of_two() -> None:
    """A layer's input of 16,384 tokens, 168 MB in bf16, takes 268 MB of PyTorch's cache."""
    settings = replace(FULL, offloads_checkpoints=True, zero=OFFLOADED, main_tokens=16_384, probe_tokens=0)
    pinned, pageable = (estimate_memory(QWEN3_32B, replace(settings, on_gpu=on_gpu)).host for on_gpu in (True, False))
    assert pageable["activation checkpoints"] == 65 * 16_384 * 5_120 * 2
    assert pinned["activation checkpoints"] == 65 * 2**28
    assert pageable["gradients"] <= pinned["gradients"] == 2 * 2 ** math.ceil(math.log2(pageable["gradients"] / 2))
    assert pinned["moments"] == pageable["moments"]
    of_probe = replace(settings, main_tokens=1, probe_tokens=16_384)
    assert estimate_memory(QWEN3_32B, of_probe).host["activation checkpoints"] == pinned["activation checkpoints"]


def choose(num_bytes: float, settings: MemorySettings = FULL, *, recomputes_all: bool = False) -> ActivationMemory:
    available = Available(int(num_bytes), 2**50)
    chosen = choose_activations(QWEN3_32B, settings, None, available, recomputes_all=recomputes_all)
    before, after = (estimate_memory(QWEN3_32B, replace(settings, activations=x)) for x in (ActivationMemory(), chosen))
    assert available.holds_with_margin(after) or (chosen.num_stored, chosen.stores_attention) == (0, False)
    assert after.peak_bytes >= before.peak_bytes
    return chosen


def test_memory_that_is_free_keeps_activations() -> None:
    """Large blocks of logits first, then outputs of attention, gradients by the logits, and layers."""
    needed = estimate_memory(QWEN3_32B, FULL)
    assert choose(needed.peak_bytes) == ActivationMemory(64)
    everything = ActivationMemory(64, 64, True, LossMemory(2**31, keeps_logit_gradients=True))
    assert choose(2**50) == everything
    rooms = [needed.peak_bytes + needed.margin_bytes + gib * 2**30 for gib in range(0, 200, 10)]
    chosen = [choose(room) for room in rooms]
    with_gradients = [x.num_stored for x in chosen if x.loss.keeps_logit_gradients]
    assert with_gradients == sorted(with_gradients) and with_gradients[-1] > 40
    outputs = 64 * 16_384 * 64 * (2 * 128 + 4)  # layers, tokens, heads; bf16, and a log-sum-exp
    by_hand = ActivationMemory(64, 1, True, LossMemory(2**31))
    without = replace(by_hand, num_stored=0, stores_attention=False)
    kept = [estimate_memory(QWEN3_32B, replace(FULL, activations=x)).phases["main"] for x in (without, by_hand)]
    layer = sum(kept[1].values()) - sum(kept[0].values()) - 63 * outputs // 64
    # Of each token: inputs of the second norm and, by head, of those of queries and keys, each with an inverse in fp32;
    # rotated queries and keys, values, output and log-sum-exp; gate and up; inputs of three linear layers.
    norms = 2 * 5_120 + 2 * 4 + 72 * (2 * 128 + 4)
    assert layer == 16_384 * (norms + 2 * 2 * 72 * 128 + 4 * 64 + 2 * 2 * 25_600 + 2 * (2 * 5_120 + 25_600))
    assert choose(2**50, recomputes_all=True) == replace(everything, num_stored=0, stores_attention=False)
    lora = replace(FULL, lora=LoraConfig(rank=8, alpha=8))
    assert choose(2**50, lora).loss == LossMemory(2**31)  # the gradient of a frozen weight is not needed
    assert choose(2**50, replace(FULL, is_checkpointed=False)) == replace(
        everything, num_stored=0, stores_attention=False
    )
    other = replace(QWEN3_32B, is_counted=False)
    chosen_for_other = choose_activations(other, FULL, None, Available(2**50, 2**50), recomputes_all=False)
    assert chosen_for_other == replace(everything, num_stored=0, stores_attention=False)
    for shape, settings in ((replace(QWEN3_32B, has_plain_logits=False), FULL), (QWEN3_32B, replace(FULL, tensor=2))):
        assert choose_activations(
            shape, settings, None, Available(2**50, 2**50), recomputes_all=False
        ).loss == LossMemory(2**31)
    on_cpu = choose(2**50, replace(FULL, on_gpu=False))
    assert on_cpu == replace(everything, loss=DEFAULT_LOSS_MEMORY)
    assert on_cpu.recomputed_share == 0 and choose(2**50, recomputes_all=True).recomputed_share == 1
    in_fp32 = choose(2**50, replace(FULL, number_bytes=4))
    assert in_fp32 == replace(everything, loss=LossMemory(2**31))  # whose gradients take as much as its logits


NUM_TOKENS = 96
SIZES = dict(hidden_size=96, head_dim=32, intermediate_size=160)
LAYERS = {  # model type, sizes, and bytes of `1 + weight` in fp32 that the norms of Gemma save
    "dense": (None, SIZES, 0),
    "moe": ("qwen3_moe", dict(SIZES, moe_intermediate_size=48, mlp_only_layers=[]), 0),
    "llama": ("llama", dict(SIZES, num_key_value_heads=2), 0),
    "mistral": ("mistral", dict(SIZES, num_key_value_heads=2), 0),
    "qwen2": ("qwen2", dict(SIZES, num_key_value_heads=2), 0),
    "repeated heads": ("qwen2", dict(SIZES, num_key_value_heads=1), 0),
    "four norms": ("gemma3_text", dict(SIZES, num_key_value_heads=2), 4 * (4 * 96 + 2 * 32)),
}


def count_saved_bytes(model: TokenLossModel) -> int:
    """Count the bytes of the tensors that autograd saves in a forward, parameters apart."""
    for module in model.modules():
        if isinstance(module, TokenDropout):
            module.token_keys = torch.ones(1, NUM_TOKENS, dtype=torch.int32)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = model(*tiny.inputs(tiny.make_batch(1, NUM_TOKENS)))
    del losses
    return sum(storage.nbytes() for address, storage in saved.items() if address not in parameters)


@pytest.mark.parametrize("dropout", [None, 0.0, 0.1], ids=["all parameters", "adapters", "adapters with dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_keeps_what_autograd_saves(
    layer: str, dtype: torch.dtype, dropout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, with and without activation checkpoints."""
    kind, sizes, constants = LAYERS[layer]
    lora = None if dropout is None else LoraConfig(rank=4, alpha=8, dropout=dropout)
    settings = MemorySettings(num_ranks=1, main_tokens=NUM_TOKENS, lora=lora, number_bytes=dtype.itemsize)
    if layer == "repeated heads":  # as on a GPU before torch 2.12
        attend, repeat = attention._attend, attention._repeat_kv_heads
        settings = replace(settings, repeats_kv_heads=True)
        monkeypatch.setattr(attention, "_attend", lambda q, k, v, *more: attend(q, *repeat(q, k, v), *more))
    options = dict(lora=lora is not None, dropout=dropout or 0.0, dtype=dtype, moe_kind=kind, on_experts=False)
    saved, estimated, backward = {}, {}, {}
    for is_checkpointed in (False, True):
        kept, phases = [], []
        for num_layers in (1, 2):
            model = tiny.token_loss_model(
                checkpointing=is_checkpointed, num_hidden_layers=num_layers, **options, **sizes
            )
            kept.append(count_saved_bytes(model))
            shape = parse_shape(model.base.config.to_dict())
            assert shape is not None
            few_logits = replace(shape, vocabulary_size=8)  # the peak is a layer's, not the loss's
            phases.append(
                estimate_memory(few_logits, replace(settings, is_checkpointed=is_checkpointed)).phases["main"]
            )
        part = "activation checkpoints" if is_checkpointed else "activations"
        saved[is_checkpointed] = kept[1] - kept[0] - (0 if is_checkpointed else constants)
        estimated[is_checkpointed] = phases[1][part] - phases[0][part]
        backward[is_checkpointed] = phases[1]["a layer's backward"]
    assert estimated == saved
    assert shape.is_counted == (layer != "four norms")
    assert saved[True] == NUM_TOKENS * 96 * dtype.itemsize
    # The layer that is recomputed saves the same; a norm of Llama its input, which is the checkpoint.
    assert backward[True] - backward[False] == saved[False] - (saved[True] if layer != "four norms" else 0)


MUON = ["optimizer.name=muon"]
IN_FP32 = ["model.precision=fp32", "engine.deepspeed_config=ds_configs/zero3_fp32.json"]


def plan_recipe_memory(num_ranks: int, *overrides: str, on_gpu: bool = True) -> MemoryPlan:
    settings = derive_plan_settings(load_recipe(RECIPE, [*overrides]))
    plan = plan_batch(settings, num_ranks, QWEN3_32B)
    memory = plan_memory(settings, plan, deepspeed_config(settings, plan), {}, on_gpu=on_gpu)
    assert memory is not None
    return memory


def test_memory_settings_follow_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = plan_recipe_memory(16).settings
    assert (settings.num_ranks, settings.main_tokens, settings.probe_tokens) == (16, 16384, 16384)
    assert settings.estimator == "jvp" and settings.is_checkpointed
    assert settings.is_fused and settings.utility_tokens == 0
    assert (settings.zero.bucket_numel, settings.zero.max_live_parameters) == (200_000_000, 10**9)
    separate = plan_recipe_memory(16, "utility.fused=false").settings
    assert not separate.is_fused and separate.utility_tokens == 16384
    sft = plan_recipe_memory(16, "methods/sft.yaml").settings
    assert sft.estimator is None and sft.probe_tokens == sft.utility_tokens == 0
    file = "engine.deepspeed_config=ds_configs/zero3_bf16_"
    assert plan_recipe_memory(16, f"{file}hierarchical.json").settings.zero.ranks_of_second_copy == 8
    offloaded = plan_recipe_memory(16, f"{file}offload_all.json").settings
    assert offloaded.zero.offloads_parameters and offloaded.zero.offloads_optimizer
    assert plan_recipe_memory(16, "checkpoint.async=true").settings.stages_checkpoints
    assert [plan_recipe_memory(16, on_gpu=on_gpu).settings.on_gpu for on_gpu in (True, False)] == [True, False]
    monkeypatch.setattr(fit, "version", lambda name: "2.11.0+cu130")  # whose attention takes no grouped heads
    assert [plan_recipe_memory(16, on_gpu=on_gpu).settings.repeats_kv_heads for on_gpu in (True, False)] == [
        True,
        False,
    ]
    monkeypatch.setattr(fit, "version", lambda name: "2.12.0a0")
    assert not plan_recipe_memory(16).settings.repeats_kv_heads
    assert not settings.keeps_direction and plan_recipe_memory(16, "probe.every=4").settings.keeps_direction
    coalesced = plan_recipe_memory(16, "engine.coalesce_gradient_reduction=true").settings
    assert coalesced.coalesces_gradients and not settings.coalesces_gradients
    # Rows of the longest sequence, where the recipe has a number of them and no packs.
    rows = ("batch.pack_tokens_per_rank=null", "batch.micro_batch_size_per_rank=2", "data.cutoff_length=1000")
    several = ("utility.fused=false", "utility.micro_batch_size_per_rank=6")
    padded = plan_recipe_memory(16, *rows, *several).settings
    assert (padded.main_tokens, padded.utility_tokens) == (2000, 6000)
    assert (
        plan_recipe_memory(4, f"{file}hierarchical.json").settings.zero.ranks_of_second_copy == 4
    )  # there are no more
    assert plan_recipe_memory(16, f"{file}offload_optimizer.json").settings.zero.offloads_parameters is False
    assert plan_recipe_memory(16, "probe.rank=64").settings.probe_rank == 64
    assert plan_recipe_memory(16, *MUON, "probe.direction=muon").settings.has_muon_direction
    unused = plan_recipe_memory(
        16, *MUON, "probe.direction=muon", "probe.rank=64", "probe.every=4", "methods/sft.yaml"
    ).settings
    assert not unused.has_muon_direction and not unused.keeps_direction and unused.probe_rank is None
    assert plan_recipe_memory(16, *IN_FP32).settings.number_bytes == 4


def test_memory_is_that_of_the_passes_and_of_the_model_itself() -> None:
    settings = derive_plan_settings(load_recipe(RECIPE))
    plan, waste = plan_batch(settings, 16, QWEN3_32B), Waste(10, 10, 1.0, 1.0, 0)
    passes = {"main": Utilization(4, waste, 3000, 1.0), "probe": Utilization(1, waste, 500, 1.0)}
    given = settings, plan, deepspeed_config(settings, plan), passes
    counts = [ParameterCounts(n, n) for n in (0, 16 * 10**9)]
    memory, unknown, half = (plan_memory(*given, one, on_gpu=True) for one in (None, *counts))
    assert memory is not None and unknown is not None and half is not None
    assert (memory.settings.main_tokens, memory.settings.probe_tokens, memory.sequence_parallel) == (3000, 500, 4)
    assert unknown.estimate == memory.estimate and unknown.counts is None
    assert half.estimate.persistent["parameters"] == 2 * 10**9


def test_ranks_without_gpus_have_one_memory() -> None:
    offloaded = MemoryEstimate({"parameters": 5}, {"main": {"loss": 2}}, {"moments": 3})
    assert [Available(n, 0, is_cpu=True).holds(offloaded) for n in (9, 10)] == [False, True]
    assert [Available(7, n).holds(offloaded) for n in (2, 3)] == [False, True]
    assert not Available(10, 3).holds(offloaded, margin=4) and Available(11, 3).holds(offloaded, margin=4)


def test_an_asynchronous_checkpoint_takes_its_size_in_host_memory() -> None:
    trained = parameter_counts(QWEN3_32B).trained
    for changed, num_bytes in (
        ({}, 12), ({"zero": OFFLOADED}, 12), ({"optimizer": "sgd"}, 4), ({"keeps_direction": True}, 12 + 2),
    ):  # fmt: skip
        staged = estimate_memory(QWEN3_32B, replace(FULL, stages_checkpoints=True, **changed))
        direct = estimate_memory(QWEN3_32B, replace(FULL, **changed))
        assert staged.persistent == direct.persistent
        assert (staged.host_bytes - direct.host_bytes) * FULL.num_ranks == pytest.approx(num_bytes * trained, rel=1e-6)
    short = Available(device=200 * GIB, host=40 * GIB)
    changes = plan_recipe_memory(8, "checkpoint.async=true").find_memory_changes(short)
    assert short.holds(changes["checkpoint.async=false"])


@pytest.mark.parametrize(
    "num_ranks, overrides, fitting",
    [
        (8, [], ["engine.deepspeed_config=ds_configs/zero3_bf16_offload_optimizer.json", "16 ranks"]),
        (64, ["model.gradient_checkpointing=false"], ["model.gradient_checkpointing=true"]),
        (8, ["parts/layers/tensor8.yaml"], ["16 ranks"]),
        (8, ["batch.pack_tokens_per_rank=131072", "engine.deepspeed_config=ds_configs/zero3_bf16_offload_all.json"],
         ["batch.pack_tokens_per_rank=65536"]),
        (8, ["engine.deepspeed_config=ds_configs/zero3_bf16_hierarchical.json", "model.activation_offload=true"], []),
        (8, ["batch.pack_tokens_per_rank=null", "batch.micro_batch_size_per_rank=2", "utility.fused=false"], []),
    ],
)  # fmt: skip
def test_remedies_fit_where_they_are_said_to(num_ranks: int, overrides: list[str], fitting: list[str]) -> None:
    memory = plan_recipe_memory(num_ranks, *overrides)
    assert not H100.holds(memory.estimate)
    changes = memory.find_memory_changes(H100)
    assert set(fitting) <= {words for words, estimate in changes.items() if H100.holds(estimate)}
    assert set(changes).isdisjoint(overrides)
    assert ("batch.micro_batch_size_per_rank=1" in changes) == any("micro_batch_size" in words for words in overrides)
    for words, estimate in changes.items():
        if "sequence_parallel" in words:
            names = ("main_tokens", "probe_tokens", "utility_tokens")
            half = replace(memory.settings, **{name: round(getattr(memory.settings, name) / 2) for name in names})
            assert words == "batch.sequence_parallel=2 probe.sequence_parallel=2"
            assert estimate == estimate_memory(QWEN3_32B, half)
        elif words.endswith(" ranks"):  # the estimate is that of a run on them
            assert estimate == plan_recipe_memory(int(words.split()[0]), *overrides).estimate
        elif "pack_tokens" not in words:
            assert estimate == plan_recipe_memory(num_ranks, *overrides, *words.split()).estimate


def test_remedies_end_where_none_would_help() -> None:
    packed = plan_recipe_memory(8)
    assert "batch.pack_tokens_per_rank=8192" in packed.find_memory_changes(H100)  # the longest on several ranks
    alone = plan_recipe_memory(8, "batch.sequence_parallel=1", "probe.sequence_parallel=1")
    short = plan_recipe_memory(8, "batch.pack_tokens_per_rank=2046", "data.cutoff_length=1024")
    for memory in (alone, short):  # it would fit no rank, or be shorter than passes are worth
        assert not any("pack_tokens" in words for words in memory.find_memory_changes(H100))
    assert not any("deepspeed" in words for words in plan_recipe_memory(8, *IN_FP32).find_memory_changes(H100))
    sft = plan_recipe_memory(
        8, "methods/sft.yaml", "batch.pack_tokens_per_rank=null", "batch.micro_batch_size_per_rank=1"
    )
    assert "batch.sequence_parallel=2" in sft.find_memory_changes(H100)
    on_most = replace(packed, settings=replace(packed.settings, num_ranks=1024)).estimate.peak_bytes
    ranks = [[w for w in packed.find_memory_changes(Available(n, 0)) if " ranks" in w] for n in (on_most, on_most - 1)]
    assert ranks == [["1024 ranks"], []]
    # A doubled number at a time, and ranks of all tensor-parallel groups together.
    on_32 = plan_recipe_memory(32).estimate.peak_bytes
    assert "32 ranks" in packed.find_memory_changes(Available(on_32, 0))
    sharded = plan_recipe_memory(8, "parts/layers/tensor8.yaml")
    on_2048 = replace(sharded, settings=replace(sharded.settings, num_ranks=256)).estimate.peak_bytes
    assert not any(" ranks" in words for words in sharded.find_memory_changes(Available(on_2048, 0)))
    on_cpus = packed.find_memory_changes(Available(on_32, 0, is_cpu=True))
    assert on_cpus and not any("offload" in words for words in on_cpus)
    # What `auto` stores can be recomputed.
    for stored in (ActivationMemory(64, 3), ActivationMemory(64, 0, True)):
        settings = replace(packed.settings, activations=stored)
        change = replace(packed, settings=settings).find_memory_changes(H100)["model.gradient_checkpointing=true"]
        assert change == estimate_memory(QWEN3_32B, replace(settings, activations=ActivationMemory(64)))
    # Sequences are on two ranks already; some architectures allow no sequence parallelism.
    on_two = replace(sft, sequence_parallel=2).find_memory_changes(H100)["batch.sequence_parallel=4"]
    assert on_two == estimate_memory(QWEN3_32B, replace(sft.settings, main_tokens=sft.settings.main_tokens // 2))
    without = replace(QWEN3_32B, no_sequence_parallelism="a reason")
    other = replace(sft, plan=replace(sft.plan, time_model=replace(sft.plan.time_model, shape=without)))
    assert not any("sequence_parallel" in words for words in other.find_memory_changes(H100))


def test_words_on_memory_that_is_tight_or_was_exhausted() -> None:
    memory = plan_recipe_memory(16)
    estimate = memory.estimate
    tight = fit.describe_tightness(memory, Available(estimate.peak_bytes, 2**50)).splitlines()
    assert any(line.startswith("  32 ranks: ") for line in tight) and not any("  16 ranks" in line for line in tight)
    assert not any("not enough" in line for line in tight)  # each takes less than what suffices without a margin
    exhausted = fit.describe_exhaustion(memory, is_cpu=False)
    assert "  32 ranks: " in exhausted and "(no recipe setting)" not in exhausted
    offloaded = plan_recipe_memory(16, "engine.deepspeed_config=ds_configs/zero3_bf16_offload_all.json")
    on_cpu = fit.describe_exhaustion(offloaded, is_cpu=True)
    assert "  32 ranks: " in on_cpu and "deepspeed_config" not in on_cpu
    room = Available(estimate.peak_bytes, 0, is_cpu=True)
    assert fit.find_shortage(estimate, room) == ("host memory", 0, estimate.host_bytes)
    needed = offloaded.estimate.peak_bytes + offloaded.estimate.host_bytes
    room = Available(needed - 1, 0, is_cpu=True)
    assert fit.find_shortage(offloaded.estimate, room) == ("host memory", needed - 1, needed)


def test_the_message_names_bytes_and_remedies() -> None:
    message = describe_shortage(plan_recipe_memory(8), H100)
    assert message.startswith("memory: found 79.00 GiB of GPU memory for each rank; expected 97.62")
    for words in ("moments", "at the peak, in main", "activation checkpoints", "  16 ranks: ", "not enough alone"):
        assert words in message
    no_host = describe_shortage(plan_recipe_memory(8, "engine.deepspeed_config=ds_configs/zero3_bf16_offload_all.json"),
                                Available(device=79 * GIB, host=10 * GIB))  # fmt: skip
    groups = describe_shortage(plan_recipe_memory(8, "parts/layers/tensor8.yaml"), H100)
    assert "estimated for 8 ranks and 65,536 tokens in a micro-batch:" in groups
    assert "\n  16 ranks: " in groups
    assert no_host.startswith("memory: found 10.00 GiB of host memory for each rank; expected 85.7")


ENGINE = EngineConfig(deepspeed_config="ds_configs/zero3_bf16.json")


def plan_tiny_model() -> MemoryPlan:
    settings = derive_plan_settings(Recipe.model_validate(smallest_recipe()))
    plan = plan_batch(settings, 1, make_shape(2, 64, 8, 128, tied=True))
    memory = plan_memory(settings, plan, {"zero_optimization": {}}, {}, ParameterCounts(10**6, 10**6), on_gpu=True)
    assert memory is not None
    return memory


def test_a_run_that_does_not_fit_is_refused_and_one_that_just_fits_warned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_process_group(timeout_minutes=1)
    memory = plan_tiny_model()
    needed = memory.estimate.peak_bytes

    def find_available(num_bytes: int) -> Available:
        monkeypatch.setattr("vcore_ds.training.start_checks.available_memory_bytes", lambda: num_bytes)
        return find_available_memory()

    with pytest.raises(UserError, match="memory: found .* GiB of host memory for each rank"):
        check_memory(memory, find_available(needed - 1), ENGINE)
    check_memory(memory, find_available(needed - 1), ENGINE.model_copy(update={"memory_check": False}))
    assert capsys.readouterr().out == ""
    check_memory(memory, find_available(needed), ENGINE)
    assert "warning: memory: " in capsys.readouterr().out
    check_memory(memory, find_available(needed + memory.estimate.margin_bytes), ENGINE)
    check_memory(None, find_available(0), ENGINE)
    assert capsys.readouterr().out == ""


def test_a_model_of_unknown_sizes_is_not_estimated() -> None:
    settings = derive_plan_settings(load_recipe(RECIPE))
    plan = plan_batch(settings, 8, replace(QWEN3_32B, hidden_size=0))
    assert plan_memory(settings, plan, deepspeed_config(settings, plan), {}, on_gpu=True) is None


@pytest.mark.parametrize(
    "variables, num_ranks_here",
    [
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 8),  # torchrun on two nodes
        ({"WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, 8),  # deepspeed on two nodes
        ({"WORLD_SIZE": "2"}, 2),
        ({}, 1),
    ],
)
def test_the_ranks_of_a_node_share_its_memory(
    variables: dict[str, str], num_ranks_here: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    total_bytes = device.total_memory_bytes()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device, "CONTROL_GROUP", tmp_path)
    assert device.available_host_bytes() > 2_000_000
    for name, content in (("max", "2500000"), ("current", "1000000"), ("stat", "anon 9\ninactive_file 500000\n")):
        (tmp_path / f"memory.{name}").write_text(content)
    assert device.available_host_bytes() == 2_000_000 // num_ranks_here
    assert device.total_memory_bytes() == total_bytes // num_ranks_here
    (tmp_path / "memory.max").write_text("max\n")
    assert device.available_host_bytes() > 2_000_000
