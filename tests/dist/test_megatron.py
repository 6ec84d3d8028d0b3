"""Parallel layers on 4 ranks against the Hugging Face model in one process, quantity by quantity.

Two ranks are a tensor-parallel group. ZeRO-3 shards over two such pairs, which may also be sequence-parallel.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from tests.dist.test_fused import Pass, assert_fused_equals_separate, measure_peaks, run_both_passes
from tests.dist.test_memory import SIZES as MEMORY_SIZES
from tests.dist.test_memory import assert_peaks, assert_persistent_bytes, make_recipe, make_settings, measure
from tests.helpers import step_runs, tiny
from tests.helpers.parity import Case, assert_parity, run_case
from tests.helpers.ranks import run_ranks
from tests.helpers.soak import soak
from vcore_ds.distributed import layout
from vcore_ds.models.architecture_check import count_parameters
from vcore_ds.models.description import read_model
from vcore_ds.planning.hardware import GPUS, Cluster
from vcore_ds.planning.memory import estimate_memory
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import ParameterCounts, StepPasses, TimeModel, parameter_counts
from vcore_ds.planning.settings import MemorySettings
from vcore_ds.planning.step_cost import StepModel

pytestmark = pytest.mark.dist


def make_sections(clipping: float | None = None, **others) -> dict:
    """Make sections of a recipe with SGD. Adam moves a parameter whose gradient is near zero by the sign of its
    rounding; these steps move parameters by a thousand times the bound on their deviation."""
    optimizer = {"learning_rate": 0.1, "name": "sgd", "gradient_clipping": clipping}
    return {"optimizer": optimizer, **others}


SEPARATE = {"utility": {"fused": False}}
FINITE_DIFFERENCE = {"utility": {"estimator": "finite_difference", "epsilon": 5.0}}
BF16 = {"model": {"path": "none", "precision": "bf16"}}
ADAM = {"learning_rate": step_runs.LEARNING_RATE, "eps": 1e-3}
VARIANCE = {"kl_budget": 0.3, "alpha": "variance", "alpha_cap": None}
BATCH_WIDE = {"kl_budget": 0.05, "scope": "sequence_and_batch", "batch_kl_budget": 0.1}
IW_SFT = {"method": {"name": "iw_sft"}, "data": {"train_path": "none", "reference_log_probabilities": "none"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES = {
    "iw_sft, sequence-parallel": Case(sequence_parallel=(2, 2), num_main=4, sections=make_sections(**IW_SFT)),
    "eaft, packed, padded vocabulary": Case(
        packed=True, vocabulary=121, sections=make_sections(method={"name": "eaft"})
    ),
    "jvp, packed, padded vocabulary, tied, checkpointed, one reduction": Case(
        packed=True, vocabulary=121, tied=True, checkpointing=True, coalesce=True, sections=make_sections()
    ),
    "finite difference, packed, tied": Case(packed=True, tied=True, sections=make_sections(**FINITE_DIFFERENCE)),
    "direction adam, clipped probe, variance": Case(
        sections={"optimizer": ADAM, "method": VARIANCE, "probe": {"direction": "adam", "clip": 0.1}}
    ),
    "base measure and probe loss dft, ranks without sequences, clipped, offloaded optimizer": Case(
        num_main=5,
        num_probe=1,
        max_steps=1,
        sections=make_sections(clipping=0.1, method={"kl_budget": 0.1, "base_measure": "dft"}, probe={"loss": "dft"}),
        config=OFFLOAD,
    ),
    "sequence-parallel, packed, checkpointed": Case(
        sequence_parallel=(2, 1), packed=True, checkpointing=True, sections=make_sections(**SEPARATE)
    ),
} | soak({"jvp, checkpointed": Case(checkpointing=True, sections=make_sections())})
FOUR_RANK_CASE = Case(
    tensor=4, num_kv_heads=4, vocabulary=122, packed=True, checkpointing=True, sections=make_sections()
)
BF16_CASE = Case(sections=make_sections(**BF16))
PASSES = {
    "full, tied, checkpointed, packed": Pass(tied=True, checkpointing=True, packed=True, tensor=2),
    "bf16, checkpointed": Pass(precision="bf16", checkpointing=True, tensor=2),
}
MEASURED_PASS = Pass(checkpointing=True, precision="bf16", tensor=2)
"""Pass whose memory is measured; its sizes below make a rank's shard of a layer as large as in `test_fused`."""
MEMORY_CASE = ("bf16", False, True)  # precision, adapters, activation checkpoints
SIZES = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=121,
    use_cache=False,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
ARCHITECTURES: dict[str, tuple[PretrainedConfig, dict[str, bool]]] = {
    "Qwen3": (Qwen3Config(**SIZES, head_dim=16), {}),
    "Qwen3, checkpoints in host memory": (
        Qwen3Config(**SIZES, head_dim=16),
        {"checkpointing": True, "activation_offload": True},
    ),
    "Qwen2, with a window in one layer": (
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1),
        {},
    ),
    "Llama 3, scaled positions": (LlamaConfig(**SIZES, rope_parameters=LLAMA3), {}),
    "Qwen3, positions scaled by yarn": (Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN), {}),
    "Mistral, with a window": (MistralConfig(**SIZES, sliding_window=5), {}),
}


EXCHANGED: dict[str, dict[str, bool]] = {"exchanged": {}, "exchanged_checkpointed": {"checkpointing": True}}


@dataclass
class Results:
    """Deviations on one rank, by quantity."""

    cases: dict[str, dict[str, float]]
    bf16: tuple[dict[str, float], dict[str, float]]
    """With Hugging Face's layers, and with parallel layers."""
    rounding: dict[str, float]
    memory: dict[str, Any]
    """Bytes of a rank, see `test_memory.measure`."""
    parameters: ParameterCounts
    four_ranks: dict[str, float]
    """With every layer sharded over all four ranks."""


@dataclass
class Layers:
    """Deviations of the two ranks of a tensor-parallel group, without an engine."""

    architectures: dict[str, dict[str, float]]
    exchanged: tuple[dict[str, list[int]], int, int]
    exchanged_checkpointed: tuple[dict[str, list[int]], int, int]
    passes: dict[str, dict[bool, dict[str, Any]]]
    """Of `PASSES`, see `test_fused.run_both_passes`."""
    peaks: dict[str, int]


def run_all(folder: str) -> Results:
    from tests.helpers import megatron  # only here: megatron-core takes seconds to import

    bf16_alone = run_case(BF16_CASE)
    layout.arrange(tensor=2)
    layout.make_sequence_groups([2])
    cases = {name: run_case(replace(case, tensor=2)) for name, case in CASES.items()}
    bf16 = (bf16_alone, run_case(replace(BF16_CASE, tensor=2)))
    rounding = megatron.measure_stochastic_rounding()
    recipe = make_recipe(folder, *MEMORY_CASE, tensor=2)
    memory, parameters = measure(recipe), count_parameters(recipe.model.path, recipe.lora, 2)
    layout.arrange(tensor=4)
    return Results(cases, bf16, rounding, memory, parameters, run_case(FOUR_RANK_CASE))


def compare_layers() -> Layers:
    from tests.helpers import megatron

    layout.arrange(tensor=2)
    architectures = {
        name: megatron.compare_with_hugging_face(config, **options) for name, (config, options) in ARCHITECTURES.items()
    }
    exchanged = [megatron.count_exchanged_elements(**options) for options in EXCHANGED.values()]
    passes = {name: run_both_passes(case) for name, case in PASSES.items()}
    peaks = measure_peaks(MEASURED_PASS, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4)
    return Layers(architectures, *exchanged, passes, peaks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model whose memory is measured."""
    path = tmp_path_factory.mktemp("memory")
    tiny.qwen3(**MEMORY_SIZES).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Results]:
    return run_ranks(run_all, 4, str(folder))


@pytest.fixture(scope="module")
def layers() -> list[Layers]:
    return run_ranks(compare_layers, 2)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_losses_and_gradients_equal_those_of_hugging_face(layers, name):
    for result in layers:
        deviations = result.architectures[name]
        print(name, deviations)
        assert deviations["losses"] < 2e-6
        assert deviations["gradient"] < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_step_with_parallel_layers_equals_reference(results, name):
    assert_parity_and_equal_replicas([result.cases[name] for result in results])


def test_step_with_layers_on_four_ranks_equals_reference(results):
    assert_parity_and_equal_replicas([result.four_ranks for result in results])


def assert_parity_and_equal_replicas(deviations_by_rank):
    assert_parity(deviations_by_rank)
    for worst in deviations_by_rank:
        assert worst["norm"] < 1e-5
        assert worst["drift"] == 0


def test_a_pass_exchanges_the_numbers_of_the_formula(layers):
    passes, hidden, num_layers = layers[0].exchanged
    loss_numels = {name: [n for n in numels if n % hidden] for name, numels in passes.items()}
    hidden_numels = {name: [n // hidden for n in numels if n % hidden == 0] for name, numels in passes.items()}
    assert hidden_numels["forward"] == [1] * (4 * num_layers + 2)
    assert hidden_numels["backward"] == [1] * (6 * num_layers + 2)
    assert hidden_numels["tangents"] == [2] * (4 * num_layers + 2)
    # Each token's normalizer and its target's logit, and the tangent of its loss, from both ranks.
    assert [len(loss_numels[name]) for name in ("forward", "backward", "tangents")] == [1, 0, 2]


@pytest.mark.parametrize("name", EXCHANGED)
def test_a_plan_counts_the_exchanges_of_a_pass(layers, name: str):
    """Of forward and backward, and of a JVP pass."""
    passes, hidden, _ = getattr(layers[0], name)
    options, num_tokens = EXCHANGED[name], hidden // 32
    # Without each supervised token's normalizer and its target's logit, and the tangent of its loss.
    numels = {name: [n for n in pass_numels if n % num_tokens == 0] for name, pass_numels in passes.items()}
    expected = {"main": numels["forward"] + numels["backward"], "utility": numels["tangents"]}
    settings = MemorySettings(
        num_ranks=2,
        main_tokens=num_tokens,
        tensor=2,
        number_bytes=4,
        estimator="jvp",
        is_checkpointed="checkpointing" in options,
    )
    shape = ModelShape(2, 4, 2, 8, 10_000, hidden_size=32, intermediate_size=64, vocabulary_size=128)
    shard = shape.take_tensor_shard(2)
    model = StepModel(TimeModel(shard, 2, 2), parameter_counts(shard), settings, Cluster(GPUS["H100"], 4))
    for phase, phase_numels in expected.items():
        work = getattr(StepPasses.derive(settings), phase)
        traffic, num_exchanges = model.estimate_tensor_exchanges(work, num_tokens)
        assert num_exchanges == len(phase_numels)
        assert traffic.inside == 4 * sum(phase_numels) / 2  # half of the numbers stay on the rank


def test_bf16_is_about_as_close_to_the_reference_as_with_hugging_faces_layers(results):
    """The oracle computes in fp32, from the same weights."""
    for result in results:
        alone, parallel = result.bf16
        print(f"alone {alone}\nparallel {parallel}")
        assert parallel["drift"] == 0
        for quantity in ("utilities", "weights", "gradient", "parameters"):
            assert parallel[quantity] <= 2 * alone[quantity], quantity
        for quantity in ("loss", "alpha"):
            assert parallel[quantity] < 2**-8, quantity  # bf16 has 8 bits
        assert alone["gradient"] > 1e-4  # the engine did compute in bf16


def test_stochastic_rounding_is_equal_on_replicas(results):
    for result in results:
        rounding = result.rounding
        print(rounding)
        assert (rounding["masters"], rounding["perturbed"], rounding["losses"]) == (0, 0, 0)
        assert rounding["changed"] > 0.1
    assert sum(result.rounding["changed replicas"] for result in results) > 0


@pytest.mark.parametrize("name", PASSES)
def test_a_fused_forward_equals_two_separate_ones(layers, name: str) -> None:
    assert_fused_equals_separate([result.passes[name] for result in layers], PASSES[name].precision)


def test_a_fused_pass_takes_at_most_five_percent_more_memory(layers) -> None:
    for result in layers:
        print(result.peaks, result.peaks["fused"] / result.peaks["plain"])
        assert result.peaks["fused"] <= 1.05 * result.peaks["plain"]


def test_the_memory_of_a_shard_of_the_layers_is_estimated(results, folder: Path) -> None:
    """Two tensor-parallel groups of two ranks: parameters, persistent bytes within 2%, peaks within 20%."""
    shape = read_model(str(folder)).shape.take_tensor_shard(2)
    settings = replace(make_settings(*MEMORY_CASE), tensor=2)
    difference = estimate_memory(shape, replace(settings, estimator="finite_difference"))
    for result in results:
        assert result.parameters == parameter_counts(shape, settings.lora)
        assert_persistent_bytes(estimate_memory(shape, settings).persistent, result.memory["vcore"])
        assert_peaks(estimate_memory(shape, settings), difference, result.memory)
