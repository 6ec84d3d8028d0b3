"""Bytes and seconds of a step, against numbers that can be computed by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.benchmarks.gpu import SHAPES
from tests.benchmarks.gpu_plan import make_memory_settings, make_shape, predict_step
from vcore_ds.commands.plan.prediction import LengthModel, plan_run
from vcore_ds.config.load import load_recipe
from vcore_ds.config.sections import LoraConfig
from vcore_ds.planning.batch_layout import MicroBatchLimit, lay_out_batch
from vcore_ds.planning.hardware import (
    EAGER,
    GPUS,
    SLOW,
    Achieved,
    Cluster,
    Gpu,
    Traffic,
    count_exchanged_numbers,
    estimate_exchange_traffic,
    estimate_gather_traffic,
    find_gpu,
    peak_flops,
)
from vcore_ds.planning.hardware import FAST as FASTEST
from vcore_ds.planning.known_models import KNOWN_MODELS, QWEN3_32B
from vcore_ds.planning.model_shape import Experts, ModelShape
from vcore_ds.planning.passes import (
    ParameterCounts,
    PassWork,
    StepPasses,
    TimeModel,
    count_factors,
    forward_flops,
)
from vcore_ds.planning.settings import ActivationMemory, LossMemory, MemorySettings, ZeroSettings, derive_plan_settings
from vcore_ds.planning.step_cost import StepCost, StepModel

SHAPE = ModelShape(2, 4, 2, 8, 1000, hidden_size=10, intermediate_size=20, vocabulary_size=50)
"""A layer has 1,000 linear parameters, the head 500."""
COUNTS = ParameterCounts(3000, 3000)
IDEAL = Achieved(
    1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, factorization=0.0, ring_latency=0.0, ring_step_latency=0.0,
    ring_step_latency_between=0.0,
)  # fmt: skip
FAST = Gpu("any", 10**9, 1e6, math.inf, math.inf, math.inf, 1e6)
"""A million FLOP a second, also in attention; everything else at once."""
SFT = MemorySettings(num_ranks=1, main_tokens=100, number_bytes=2, zero=ZeroSettings(reuse_distance=0))
JVP = replace(SFT, probe_tokens=100, estimator="jvp", is_fused=True)


def compute_cost(
    settings: MemorySettings,
    gpu: Gpu,
    num_gpus: int,
    lengths: list[int],
    k: int = 1,
    shape: ModelShape = SHAPE,
    counts: ParameterCounts = COUNTS,
    **changed,
) -> StepCost:
    """One batch as main and as probe batch, each sequence unpacked; `changed`: fields of `Achieved`."""
    part, counts = settings.tensor, ParameterCounts(counts.all // settings.tensor, counts.trained // settings.tensor)
    cluster = Cluster(gpu, num_gpus, achieved=replace(IDEAL, **changed))
    shape = shape.take_tensor_shard(part)
    time_model = TimeModel(shape, num_gpus // part, min(8, num_gpus) // part, expert=settings.expert)
    batch_layout = lay_out_batch(
        range(len(lengths)), lengths, parallel_sizes=[k], limit=MicroBatchLimit(None, 1), time_model=time_model
    )
    model = StepModel(time_model, counts, settings, cluster)
    return model.estimate_step(StepPasses.derive(settings), [(lengths, batch_layout)], [(lengths, batch_layout)])


Forwards = tuple[float, float, float]
"""Forwards of the layers' GEMMs, of the head, and of attention."""


@pytest.mark.parametrize(
    "settings, main, probe, utility",
    [
        (SFT, (3, 4, 3.5), (0, 0, 0), (0, 0, 0)),
        (replace(SFT, is_checkpointed=True), (4, 4, 4.5), (0, 0, 0), (0, 0, 0)),
        (replace(SFT, activations=ActivationMemory(loss=LossMemory(2**28, True))), (3, 3, 3.5), (0, 0, 0), (0, 0, 0)),
        (JVP, (5, 5, 6), (3, 4, 3.5), (0, 0, 0)),
        (replace(JVP, is_fused=False), (3, 4, 3.5), (3, 4, 3.5), (3, 3, 3)),
        (replace(JVP, is_fused=False, estimator="finite_difference"), (3, 4, 3.5), (3, 4, 3.5), (1, 1, 1)),
    ],
)  # fmt: skip
def test_seconds_of_matrix_multiplications_by_hand(
    settings: MemorySettings, main: Forwards, probe: Forwards, utility: Forwards
) -> None:
    """One sequence of 16 tokens: 2 x 2,000 FLOP a token in the layers, 2 x 500 in the head, 2 x 2 layers x 4 heads x 8
    for each square. A forward of attention has 2 GEMMs, a backward 5, tangents beside them 5, and a forward together
    with tangents 6. The head computes its logits again unless it keeps their gradients."""
    layers, head, attention = 4000 * 16 / 1e6, 1000 * 16 / 1e6, 128 * 16**2 / 1e6
    assert forward_flops(SHAPE, [16]) == (layers + head + attention) * 1e6
    headless = replace(SHAPE, vocabulary_size=0)  # a batch is laid out by the work of its layers
    assert TimeModel(SHAPE, 1, 1).work(16) * 4000 == pytest.approx(forward_flops(headless, [16]))
    cost = compute_cost(settings, FAST, 1, [16])
    passes = {"probe": probe, "utility": utility, "main": main, "step": (0, 0, 0)}
    expected = {phase: n[0] * layers + n[1] * head + n[2] * attention for phase, n in passes.items()}
    assert cost.seconds == pytest.approx(expected)
    assert cost.seconds_step == pytest.approx(sum(expected.values()))
    slower = compute_cost(settings, replace(FAST, attention_flops=1e5), 1, [16])
    num_attention = sum(n[2] for n in passes.values())
    assert slower.seconds_step - cost.seconds_step == pytest.approx(9 * attention * num_attention)
    measured = compute_cost(settings, replace(FAST, attention_flops=1e5, measured_tangent_flops=1e6), 1, [16])
    with_tangents = 0.0 if settings.estimator != "jvp" else 2.5 if settings.is_fused else 2
    assert slower.seconds_step - measured.seconds_step == pytest.approx(9 * attention * with_tangents)


def test_bytes_of_memory_traffic_by_hand() -> None:
    """Sixteen tokens. Inputs and outputs of the GEMMs of a layer: 7 hidden states of 10, 3 gates of 20, 2 times 48
    numbers of queries and keys; 2,000 weights. Norms have 20 numbers a token, rotations 48, gates 20, residuals 10."""
    memory = replace(FAST, flops=math.inf, attention_flops=math.inf, memory_bandwidth=1.0)
    gemms = 2 * (2 * 16 * (70 + 60 + 96) + 2000)
    forward, backward = 4 * 20 + 4 * 48 + 6 * 20 + 12 * 10, 6 * 20 + 5 * 48 + 10 * 20 + 6 * 10
    tangents = 8 * 20 + 4 * 48 + 10 * 20 + 12 * 10
    logits, reduced = 16 * 50, 3000 * (12 + 16)
    head = 3 * logits + 2 * 500  # of one GEMM
    expected = 3 * gemms + 32 * (forward + backward) + reduced + 4 * head + logits * (10 + 6) + 10 * 500
    assert compute_cost(SFT, memory, 1, [16]).seconds["main"] == pytest.approx(expected)
    kept = replace(SFT, activations=ActivationMemory(loss=LossMemory(2**28, True)))
    assert compute_cost(kept, memory, 1, [16]).seconds["main"] == pytest.approx(expected - head - logits * 6 - 10 * 500)
    recomputed = compute_cost(replace(SFT, is_checkpointed=True), memory, 1, [16]).seconds["main"]
    assert recomputed - expected == pytest.approx(gemms + 32 * forward)
    fused = compute_cost(JVP, memory, 1, [16]).seconds["main"]
    assert fused - expected == pytest.approx(2 * gemms + 32 * tangents + head)
    blocks = replace(SFT, activations=ActivationMemory(loss=LossMemory(4 * 50)))  # one for each token
    assert compute_cost(blocks, memory, 1, [16]).seconds["main"] - expected == pytest.approx(15 * 4 * 1000)


ROWS = {
    "8b": {"sft": 1.64, "jvp, fused": 2.96, "jvp, fused, rank 32": 2.98},
    "0.6b": {"sft": 1.38, "jvp": 2.46, "jvp, fused": 2.35, "jvp, fused, rank 32": 2.58, "finite difference": 2.26},
}


@pytest.mark.parametrize(("name", "method"), [(name, method) for name in ROWS for method in ROWS[name]])
def test_measured_steps_of_an_h200_are_predicted_within_a_fifth(name: str, method: str) -> None:
    """docs/reports/performance.md. The code then had eager norms, gates and rotations, recomputed all layers, took the
    loss in blocks of 256 MiB (441 rows) at 8B and 2 GiB at 0.6B, and 70 bytes a parameter in an update."""
    sizes: dict[str, Any] = SHAPES[name] | {"num_hidden_layers": 8 if name == "8b" else 28}
    loss = LossMemory(2**28 if name == "8b" else 2**31)
    settings = replace(make_memory_settings(method, 16_384), activations=ActivationMemory(loss=loss))
    seconds = predict_step(settings, make_shape(sizes), 2, Cluster(GPUS["H200"], 1), replace(EAGER, update=68))
    error = sum(seconds.values()) / ROWS[name][method] - 1
    print(f"{name} {method}: {sum(seconds.values()):.2f} s, measured {ROWS[name][method]}, {error:+.0%}")
    assert abs(error) < 0.2


def test_a_low_rank_direction_by_hand() -> None:
    """Rank 4. In a layer, factors of q and o, k and v, and the MLP: 2 x 4 x 42, 2 x 4 x 26, 3 x 4 x 30; of an embedding
    4 x 60. The matrices of a forward have 3,620 elements."""
    settings = replace(JVP, probe_rank=4)
    cost = compute_cost(settings, FAST, 1, [16])
    linear, head, square = 5000 * 16 / 1e6, 1000 * 16 / 1e6, 128 * 16**2 / 1e6
    in_layers = 2 * (336 + 208 + 360)
    assert cost.seconds["main"] == pytest.approx((4 + (in_layers + 240) / 3620) * linear + 6 * square)
    assert cost.seconds["probe"] == pytest.approx(3 * linear + head + 3.5 * square + 4 * 4 * 3000 / 1e6)
    late = compute_cost(settings, FAST, 1, [16], factorization=0.5)  # of 2 layers' 7 matrices, and 2 embeddings
    assert late.seconds["probe"] - cost.seconds["probe"] == pytest.approx(0.5 * (2 * 7 + 2))
    traffic = compute_cost(settings, FAST, 16, [16] * 16).traffic
    assert "tangents" not in traffic
    # Two sums in fp32, each a reduce-scatter and an all-gather.
    assert traffic["factors of the direction"].inside == pytest.approx(2 * 4 * (in_layers + 2 * 240) * 7 / 8)
    assert count_factors(SHAPE, 10, active=True) == 3620  # as they are, where factors would save nothing
    twice = compute_cost(replace(settings, rank_passes=2), FAST, 1, [16])
    assert twice.seconds["probe"] - cost.seconds["probe"] == pytest.approx(4 * 4 * 3000 / 1e6)
    separate = StepPasses.derive(replace(settings, is_fused=False, tensor=2)).utility
    assert separate is not None and (separate.linear, separate.num_with_tangents) == (2, 1)


def test_weight_matrices_with_experts_by_hand() -> None:
    """Three layers, two of them with 8 experts of width 6, of which a token takes 3, and a shared one of width 5."""
    shape, attention = replace(SHAPE, num_layers=3, experts=Experts(2, 8, 3, 6, 5)), [(6, 32, 10), (6, 16, 10)]
    for active, num_experts, num_embeddings in ((False, 8, 2), (True, 3, 1)):
        others = [(3, 20, 10), (6 * num_experts, 6, 10), (6, 5, 10), (num_embeddings, 50, 10)]
        assert shape.list_weight_matrices(active=active) == [*attention, *others]
    bare = replace(shape, is_tied=True, experts=Experts(3, 8, 3, 6))
    assert bare.list_weight_matrices() == [*attention, (9 * 8, 6, 10), (1, 50, 10)]
    assert (shape.expert_parameters, shape.idle_parameters) == (6 * 10 * 8 * 6, 6 * 10 * 5 * 6)


def test_fp8_tangents_by_hand() -> None:
    """Half the time of one GEMM of the layers' matrices, without the head; the FLOP stay. Rounding moves 17 bytes for
    each of their 2,000 elements, and for inputs of 3 x 10 + 32 (attention) and 2 x 10 + 20 (MLP) numbers a token."""
    passes, in_fp8 = StepPasses.derive(JVP), StepPasses.derive(replace(JVP, fp8_tangents=True))
    assert in_fp8.flops(SHAPE, [16], []) == passes.flops(SHAPE, [16], [])
    cost, cheaper = (compute_cost(settings, FAST, 1, [16]) for settings in (JVP, replace(JVP, fp8_tangents=True)))
    head = 2 * SHAPE.vocabulary_size * SHAPE.hidden_size
    saved = cost.seconds["main"] - cheaper.seconds["main"]
    assert saved == pytest.approx(0.5 * (5000 - head) * 16 / 1e6)
    assert cheaper.seconds["probe"] == cost.seconds["probe"]
    with_memory = replace(FAST, memory_bandwidth=1e9)
    rounded = compute_cost(replace(JVP, fp8_tangents=True), with_memory, 1, [16], memory=1.0).seconds["main"]
    plain = compute_cost(JVP, with_memory, 1, [16], memory=1.0).seconds["main"]
    expected = 0.5 * (5000 - head) * 16 / 1e6 - 17 * (2000 + 16 * 2 * (62 + 40)) / 1e9
    assert plain - rounded == pytest.approx(expected)


def test_adapters_need_no_gradient_of_weights() -> None:
    lora = replace(SFT, lora=LoraConfig(rank=4, alpha=8))
    train = PassWork(2, 3, gathers=2, exchanges=2, runs=2, reduces=True, attention_again=0.5)
    assert StepPasses.derive(lora).main == train
    # One of two layers is recomputed, from the output of its attention.
    kept = replace(SFT, is_checkpointed=True, activations=ActivationMemory(2, num_stored=1, stores_attention=True))
    assert StepPasses.derive(kept).main == replace(train, linear=3.5, exchanges=2.5)
    fused = StepPasses.derive(replace(lora, estimator="jvp", is_fused=True))
    assert (fused.main.linear, fused.main.attention, fused.main.tangent_gathers) == (3, 5, 1)
    with_dropout = replace(lora, lora=LoraConfig(rank=4, alpha=8, dropout=0.1), estimator="finite_difference")
    assert StepPasses.derive(with_dropout).utility == PassWork(2, 2, gathers=2, exchanges=2, runs=2)
    assert StepPasses.derive(lora, other_forwards=1).utility == PassWork(1, 1, 1, 1, 1)


def test_bytes_of_all_gathers_by_hand() -> None:
    assert estimate_gather_traffic(800.0, 8, 8) == Traffic(700.0, 0.0)
    assert estimate_gather_traffic(800.0, 16, 8) == Traffic(
        700.0, 50.0
    )  # half is in the node already; eight adapters bring the rest
    assert estimate_gather_traffic(800.0, 1, 1) == Traffic(0.0, 0.0)
    cost = compute_cost(JVP, FAST, 16, [16] * 16)
    # 3,000 parameters of 2 bytes, a third of them in embeddings. Both batches gather all of them, the first layer and
    # the head again in the backward, and reduce all gradients; the tangents are gathered once.
    assert cost.traffic["parameters"].inside == pytest.approx(2 * 9000 * 7 / 8)
    assert cost.traffic["parameters"].between == pytest.approx(2 * 9000 / 2 / 8)
    assert cost.traffic["gradients"] == Traffic(2 * 6000 * 7 / 8, 2 * 6000 / 2 / 8)
    assert cost.traffic["tangents"] == cost.traffic["gradients"] * 0.5
    assert sum(moved.between for moved in cost.traffic.values()) == pytest.approx(36_000 / 2 / 8)


@pytest.mark.parametrize(
    "reuse_distance, again", [(0, 1500), (999, 1500), (1001, 1000), (1499, 1000), (1501, 0), (10**9, 0)]
)
def test_parameters_that_are_still_gathered_are_not_gathered_again(reuse_distance: int, again: int) -> None:
    """Layers of 1,000 parameters, a head of 500: the last layer stays, the head up to twice its size, and the first
    layer where the second and the head are within the distance."""
    cost = compute_cost(replace(SFT, zero=ZeroSettings(reuse_distance=reuse_distance)), FAST, 2, [16])
    assert cost.traffic["parameters"].inside == pytest.approx((6000 + 2 * again) / 2)


def test_bytes_of_divided_experts_and_of_a_second_copy_by_hand() -> None:
    """Six thousand parameters, 2,880 of them in experts, on four ranks of a node."""
    shape, counts = replace(SHAPE, experts=Experts(2, 8, 3, 6)), ParameterCounts(6000, 6000)
    settings = replace(SFT, expert=2, zero=ZeroSettings(reuse_distance=10**9))
    divided = compute_cost(settings, FAST, 4, [16] * 4, shape=shape, counts=counts).traffic
    assert divided["parameters"] == divided["gradients"] == Traffic(2 * (3120 * 3 / 4 + 2880 / 2 * 1 / 2), 0.0)
    adapters = replace(settings, lora=LoraConfig(rank=4, alpha=8))
    frozen = compute_cost(adapters, FAST, 4, [16] * 4, shape=shape, counts=ParameterCounts(6000, 100))
    assert frozen.traffic["gradients"].inside == pytest.approx(2 * 100 * 3 / 4)
    # The forward gathers from all ranks, the backward one of two layers and the head from the two that share a copy.
    copied = replace(SFT, zero=ZeroSettings(reuse_distance=0, ranks_of_second_copy=2))
    moved = compute_cost(copied, FAST, 4, [16] * 4, shape=shape, counts=counts).traffic["parameters"]
    assert moved.inside == pytest.approx(2 * 6000 * 3 / 4 + 2 * (5000 / 2 + 500) * 1 / 2)


def test_bytes_of_sequence_parallelism_by_hand() -> None:
    assert count_exchanged_numbers(QWEN3_32B, 8) == 128 * (64 + 2 * 8 + 64)
    assert count_exchanged_numbers(QWEN3_32B, 16) == 128 * (64 + 2 * 16 + 64)
    assert (
        estimate_exchange_traffic(1600.0, 16, 8) == Traffic(700.0, 800.0)
        and estimate_exchange_traffic(100.0, 1, 8) == Traffic()
    )
    # Two exchanges of 40 us in a layer, in tokens of 2 x 1,000 FLOP at 400 TFLOP/s.
    assert TimeModel(SHAPE, 2, 2).estimate_exchange_latency(2) == pytest.approx(2 * 40e-6 * 400e12 / 2000)
    cost = compute_cost(JVP, FAST, 2, [32], k=2)
    # A forward: 16 tokens, 2 layers, 8 x (2 x 4 + 2 x 2) numbers of 2 bytes, half of them to the other rank.
    forward = 16 * 2 * 96 * 2 / 2
    assert cost.traffic["sequence-parallel activations"] == Traffic(
        inside=(2 + 3) * forward
    )  # of the probe, and of main with tangents


FULL = replace(SFT, tensor=2)


@pytest.mark.parametrize(
    "settings, num_exchanges, num_hidden",
    [
        (FULL, 10 + 14, 10 + 14),  # 4 x 2 + 2 in a forward, 6 x 2 + 2 in a backward
        (replace(FULL, is_checkpointed=True), 10 + 8 + 14, 10 + 8 + 14),  # the layers again, without embedding and head
        (replace(FULL, estimator="jvp", is_fused=True), 10 + 14, 20 + 14),  # values and tangents together
    ],
)
def test_exchanges_of_a_tensor_parallel_layer_by_hand(
    settings: MemorySettings, num_exchanges: int, num_hidden: int
) -> None:
    main = StepPasses.derive(settings).main
    assert main.count_hidden_state_exchanges(2) == (num_exchanges, num_hidden)


def test_seconds_and_bytes_of_tensor_parallelism_by_hand() -> None:
    """Two groups of two GPUs, 16 tokens each: half of the FLOP and all-gathers, plus hidden states of 10 numbers."""
    cost = compute_cost(FULL, FAST, 4, [16] * 2)
    alone = compute_cost(SFT, FAST, 2, [16] * 2)
    assert cost.seconds["main"] == pytest.approx(alone.seconds["main"] / 2)
    assert cost.traffic["tensor-parallel activations"] == Traffic(inside=24 * 16 * 10 * 2 / 2)
    assert cost.traffic["gradients"] == alone.traffic["gradients"] * 0.5 == Traffic(inside=3000 / 2)
    late = compute_cost(FULL, FAST, 4, [16] * 2, exchange_latency=0.25)
    assert late.seconds_step - cost.seconds_step == pytest.approx(24 * 0.25)
    # Weights and gradients over two groups take 1,500 bytes for each of 2.5 passes over all of them.
    slow = compute_cost(FULL, replace(FAST, node_bandwidth=384.0), 4, [16] * 2)
    gathers = (slow.traffic["parameters"] + slow.traffic["gradients"]).inside / 384
    assert slow.seconds_step - cost.seconds_step - gathers == pytest.approx(10)


def test_tensor_parallelism_saves_no_bytes_between_nodes() -> None:
    """A GPU receives as many bytes from other nodes for a shard of an eighth as for the full 800 on 4 nodes of 8."""
    assert estimate_gather_traffic(800.0, 32, 8).between == estimate_gather_traffic(100.0, 4, 1).between == 75.0
    cost = {tensor: compute_cost(replace(SFT, tensor=tensor), FAST, 32, [16] * (32 // tensor)) for tensor in (1, 2)}
    for kind in ("parameters", "gradients"):
        assert cost[2].traffic[kind].between == pytest.approx(cost[1].traffic[kind].between)


def test_all_gathers_overlap_with_matrix_multiplications() -> None:
    slow = replace(FAST, node_bandwidth=1000.0)  # 3 s for all parameters, 1.5 for the backward, 3 for the gradients
    computed = compute_cost(SFT, FAST, 2, [16] * 2).seconds_step  # nothing else takes time
    assert compute_cost(SFT, slow, 2, [16] * 2).seconds_step == pytest.approx(computed + 7.5)
    half = compute_cost(SFT, slow, 2, [16] * 2, hidden=0.5)
    assert half.seconds_step == pytest.approx(computed + 7.5 - 0.5 * computed)
    late = compute_cost(
        replace(SFT, zero=replace(SFT.zero, prefetch_numel=400)), slow, 2, [16] * 2, hidden=1.0
    )  # 600 of a layer's 1,000
    assert late.seconds_step == pytest.approx(computed + 0.6 * 4.5 + max(7.5 - 0.6 * 4.5 - computed, 0.0))
    many, much = (compute_cost(SFT, gpu, 2, [16] * 2, compute=1e-3, hidden=0.5) for gpu in (slow, FAST))
    assert many.seconds_step - much.seconds_step == pytest.approx(0.75)  # the first layer's are never hidden


def test_the_update_reads_and_writes_the_shard() -> None:
    memory = replace(FAST, flops=math.inf, attention_flops=math.inf, memory_bandwidth=1000.0)
    shard = 3000 / 2
    assert compute_cost(SFT, memory, 2, [16] * 2).seconds["step"] == pytest.approx(shard * (24 + 16 + 2) / 1000)
    sgd = compute_cost(replace(SFT, optimizer="sgd"), memory, 2, [16] * 2)
    assert sgd.seconds["step"] == pytest.approx(shard * (24 + 2) / 1000)
    # A perturbation reads a direction in fp32 and the parameters, which it writes; so does putting them back.
    perturbed = replace(JVP, is_fused=False, estimator="finite_difference")
    whole, half = (compute_cost(perturbed, memory, n, [16] * n).seconds["utility"] for n in (1, 2))
    assert whole - half == pytest.approx(2 * shard * (4 + 2 + 2) / 1000)


def test_muon_orthogonalizes_each_matrix_once() -> None:
    """By hand, for 2 GPUs: 2 layers with 2 matrices of 32 by 10, 2 of 16 by 10 and 3 of 20 by 10."""
    muon = replace(SFT, optimizer="muon")
    without, update = (compute_cost(settings, FAST, 2, [16] * 2) for settings in (SFT, muon))
    columns = 2 * (2 * 32 + 2 * 16 + 3 * 20)
    flops = 5 * (4 * 10 * 10 * columns + 2 * 10**3 * 2 * 7)
    assert update.seconds["step"] - without.seconds["step"] == pytest.approx(flops / 2 / 1e6)
    sent = 2 * 10 * columns / 2
    assert update.traffic["matrices of Muon"].inside == pytest.approx(2 * sent / 2)
    matched = replace(JVP, optimizer="muon", has_muon_direction=True)
    plain = compute_cost(replace(JVP, optimizer="muon"), FAST, 2, [16] * 2)
    direction = compute_cost(matched, FAST, 2, [16] * 2)
    flops = 5 * (10 * 10 * 10 * columns + 4 * 10**3 * 2 * 7)
    assert direction.seconds["probe"] - plain.seconds["probe"] == pytest.approx(flops / 2 / 1e6)
    assert direction.traffic["matrices of Muon"].inside == pytest.approx(5 * sent / 2)


def test_bytes_between_nodes_of_the_largest_model_by_hand() -> None:
    """Of 65.5 GB each of a node's 8 adapters receives an eighth of the 7/8 that other nodes hold, 7.17 GB for a pass
    over all weights: 3 passes for SFT, 8 for jvp in a separate pass."""
    settings = replace(SFT, num_ranks=64, is_checkpointed=True)
    parameters = 2 * (64 * QWEN3_32B.layer_parameters + 2 * 151936 * 5120)
    once = estimate_gather_traffic(parameters, 64, 8).between
    assert 3 * once / 1e9 == pytest.approx(21.5, abs=0.05)
    passes = StepPasses.derive(replace(settings, estimator="jvp", probe_tokens=1))
    assert passes.probe is not None and passes.utility is not None
    units = sum(
        work.gathers + work.tangent_gathers + work.reduces for work in (passes.main, passes.probe, passes.utility)
    )
    assert units * once / 1e9 == pytest.approx(57.3, abs=0.1)


OTHER_GPUS = {"NVIDIA L40S": 362e12, "NVIDIA L4": 121e12, "NVIDIA GH200 480GB": 989e12}  # dense bf16


@pytest.mark.parametrize(
    "name, known",
    [
        ("H100", "H100"),
        ("h200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("h200-nvl", "H200 NVL"),
        ("GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("rtx-pro-6000", "RTX PRO 6000"),
        ("rtx_pro_6000", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        *((name, None) for name in OTHER_GPUS),
        ("x86_64", None),
    ],
)
def test_gpus_are_recognized_by_name(name: str, known: str | None) -> None:
    gpu = find_gpu(name)
    assert (gpu.name if gpu is not None else None) == known
    assert peak_flops(name) == (gpu.flops if gpu is not None else OTHER_GPUS.get(name))


def test_runs_and_plans_assume_the_same_h100() -> None:
    planned, machine_of_runs = Cluster(GPUS["H100"], 8).machine, TimeModel(QWEN3_32B, 8, 8).machine
    for field in ("node_bandwidth", "network_bandwidth", "exchange_latency"):
        assert getattr(planned, field) == pytest.approx(getattr(machine_of_runs, field), rel=0.02), field
    # GEMMs of 4 tokens at 8 FLOP/s take as long as reading bf16 weights at 2 bytes/s; and as much again for tails.
    slow, achieved = Gpu("any", 10**9, 16.0, 4.0, math.inf, math.inf, 8.0), replace(IDEAL, compute=0.5, memory=0.5)
    assert Cluster(slow, 1, achieved=achieved).machine.half_speed_tokens == pytest.approx(2 * 4)


def test_a_cluster_describes_its_gpus_and_nodes() -> None:
    assert Cluster(GPUS["B200"], 32).describe() == "32 B200 (4 nodes of 8)"
    small = Cluster(GPUS["A100"], 2)
    assert (small.describe(), small.num_nodes, small.ranks_per_node) == ("2 A100", 1, 2)
    assert small.host_bytes == 2**40 and Cluster(GPUS["A100"], 12).host_bytes == 2**38  # of 2 TiB in a node
    assert Cluster(GPUS["A100"], 12).describe() == "12 A100 (2 nodes of 8)"
    # Rings of NCCL: a start, and a step to each other rank, one of them between the nodes.
    seconds = [small.ring_seconds(*ranks) for ranks in ((1, 1), (2, 8), (16, 8))]
    assert seconds == pytest.approx([0, 14e-6 + 1.9e-6, 14e-6 + 14 * 1.9e-6 + 4e-6])


def test_plans_of_other_trainers_match_their_published_speeds() -> None:
    """Tokens a second and GPU; docs/planning.md has the sources. torchtitan recomputes about half of each layer, which
    lies between a plan with and without activation checkpoints."""

    def tokens_per_second(
        shape: ModelShape, num_gpus: int, size: int, split: int, achieved: Achieved, *more: str
    ) -> float:
        words = ["methods/sft.yaml", f"batch.global_size={size}", "data.cutoff_length=8192", *more]
        words += [f"batch.pack_tokens_per_rank={8192 // split}", f"batch.sequence_parallel={split}"]
        settings = derive_plan_settings(load_recipe("qwen3_32b_math_full.yaml", words))
        cluster = Cluster(GPUS["H100"], num_gpus, achieved=achieved)
        plan = plan_run(settings, cluster, shape, lengths=LengthModel(8192, (8192,)))
        return plan.tokens_per_step / plan.cost.seconds_step / num_gpus

    def torchtitan(num_gpus: int, achieved: Achieved, *, is_compiled: bool) -> float:
        shape = replace(KNOWN_MODELS["Llama-3.1-8B"], has_llama_norms=is_compiled)  # else by PyTorch's operations
        checkpoints = ("model.gradient_checkpointing=true", "model.gradient_checkpointing=false")
        speeds = [tokens_per_second(shape, num_gpus, 2 * num_gpus, 1, achieved, setting) for setting in checkpoints]
        return 2 / sum(1 / speed for speed in speeds)

    for num_gpus, eager, compiled in ((8, 5762, 6667), (128, 5605, 6514)):
        for speed, is_compiled in ((eager, False), (compiled, True)):
            slow, likely = (torchtitan(num_gpus, speeds, is_compiled=is_compiled) for speeds in (SLOW, Achieved()))
            print(num_gpus, speed, slow, likely, torchtitan(num_gpus, FASTEST, is_compiled=is_compiled))
            assert slow < speed < likely < 1.25 * speed
    # NeMo AutoModel with torch.compile, every layer recomputed, each sequence on two GPUs: at the fast end.
    llama, recomputing = KNOWN_MODELS["Llama-3.1-70B"], "model.gradient_checkpointing=true"
    likely, fast = (tokens_per_second(llama, 64, 128, 2, speeds, recomputing) for speeds in (Achieved(), FASTEST))
    print(likely, fast)
    assert 0.9 * 866.77 < likely < 866.77 < fast < 1.05 * 866.77


@pytest.mark.parametrize(("num_gpus", "in_place"), [(1, False), (64, False), (64, True)])
def test_a_device_that_is_faster_than_its_host_waits_for_it(num_gpus: int, in_place: bool) -> None:
    """By hand: two layers, all-gathers in forward and backward, and tangents in the main pass alone."""
    fast, options = replace(FAST, flops=1e30, attention_flops=1e30), dict(layer_overhead=0.8e-3)
    settings, lengths = (
        replace(JVP, num_ranks=num_gpus, zero=replace(JVP.zero, gathers_in_place=in_place)),
        [16] * num_gpus,
    )
    cost = compute_cost(settings, fast, num_gpus, lengths, **options)
    gathers = 0.0 if in_place or num_gpus == 1 else 2 * 2.6e-6 * num_gpus
    backward = 0.8e-3 + 2.7e-3
    assert cost.seconds["probe"] == pytest.approx(2 * (0.8e-3 + backward + gathers))
    assert cost.seconds["main"] == pytest.approx(2 * (2 * 0.8e-3 + backward + 3.3e-3 + gathers))
    in_fp8 = compute_cost(replace(settings, fp8_tangents=True), fast, num_gpus, lengths, **options)
    assert in_fp8.seconds["main"] - cost.seconds["main"] == pytest.approx(2 * 1.2e-3)
    # One that is slower does not.
    without = dict(tangent_overhead=0.0, backward_overhead=0.0, gather_overhead=0.0)
    slow, alone = (compute_cost(JVP, FAST, num_gpus, lengths, **changed) for changed in ({}, without))
    assert slow.seconds == alone.seconds
