"""Parallel layers on 4 ranks against the Hugging Face model in one process, quantity by quantity.

Two ranks are a tensor-parallel group. ZeRO-3 shards over two such pairs, which may also be sequence-parallel.
"""

from dataclasses import dataclass, replace

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from tests.helpers import step_runs
from tests.helpers.parity import Case, assert_parity, run_case
from tests.helpers.ranks import run_ranks
from tests.helpers.soak import soak
from vcore_ds.commands.plan.step_cost import StepModel
from vcore_ds.distributed import layout
from vcore_ds.planning.hardware import GPUS, Cluster
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import StepPasses, parameter_counts
from vcore_ds.planning.settings import MemorySettings

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
IW_SFT = {
    "method": {"name": "iw_sft"},
    "data": {"train_path": "none", "reference_log_probabilities": "none"},
}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES = {
    "iw_sft, sequence-parallel": Case(sequence_parallel=(2, 2), sections=make_sections(**IW_SFT)),
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
        sections=make_sections(clipping=0.1, method={"kl_budget": 0.1, "base_measure": "dft"}, probe={"loss": "dft"}),
        config=OFFLOAD,
    ),
    "sequence-parallel, packed, checkpointed": Case(
        sequence_parallel=(2, 1), packed=True, checkpointing=True, sections=make_sections(**SEPARATE)
    ),
    "norms of a kernel, checkpointed": Case(kernel_norm=True, checkpointing=True, sections=make_sections()),
} | soak(
    {
        "base measure and probe loss dft, ranks without sequences": Case(
            num_main=5,
            num_probe=1,
            sections=make_sections(method={"kl_budget": 0.1, "base_measure": "dft"}, probe={"loss": "dft"}),
        ),
        "clipped, offloaded optimizer": Case(sections=make_sections(clipping=0.1), config=OFFLOAD),
        "sft, packed": Case(packed=True, sections=make_sections(method={"name": "sft"})),
        "dft": Case(sections=make_sections(method={"name": "dft"})),
        "deft": Case(sections=make_sections(method={"name": "deft"})),
        "random, packed": Case(packed=True, sections=make_sections(method={"name": "random", "keep_share": 0.4})),
        "iw_sft, packed": Case(packed=True, sections=make_sections(**IW_SFT)),
        "jvp": Case(sections=make_sections()),
        "jvp, separate passes, tied, checkpointed": Case(
            tied=True, checkpointing=True, sections=make_sections(**SEPARATE)
        ),
        "jvp, padded vocabulary, packed": Case(vocabulary=121, packed=True, sections=make_sections()),
        "finite difference": Case(sections=make_sections(**FINITE_DIFFERENCE)),
        "clipped": Case(sections=make_sections(clipping=0.1, probe={"clip": 0.1})),
        "sequences and batch": Case(num_main=7, without_tokens=(2,), sections=make_sections(method=BATCH_WIDE)),
        "sequence-parallel": Case(sequence_parallel=(2, 2), sections=make_sections()),
        "norms of a kernel, packed": Case(kernel_norm=True, packed=True, sections=make_sections()),
        "norms of a kernel, separate passes, checkpointed": Case(
            kernel_norm=True, checkpointing=True, sections=make_sections(**SEPARATE)
        ),
    }
)
FOUR_RANK_CASE = Case(
    tensor=4, num_kv_heads=4, vocabulary=122, packed=True, checkpointing=True, sections=make_sections()
)
BF16_CASES = {
    "jvp": Case(sections=make_sections(**BF16)),
} | soak(
    {
        "sft, packed": Case(packed=True, sections=make_sections(method={"name": "sft"}, **BF16)),
        "jvp, separate passes, tied, checkpointed": Case(
            tied=True, checkpointing=True, sections=make_sections(**SEPARATE, **BF16)
        ),
    }
)
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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}
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


EXCHANGED: dict[str, dict[str, bool]] = {
    "exchanged": {},
    "exchanged_checkpointed": {"checkpointing": True},
}


@dataclass
class Results:
    """Deviations on one rank, by quantity."""

    cases: dict[str, dict[str, float]]
    bf16: dict[str, tuple[dict[str, float], dict[str, float]]]
    """With Hugging Face's layers, and with parallel layers."""
    rounding: dict[str, float]
    four_ranks: dict[str, float]
    """With every layer sharded over all four ranks."""


@dataclass
class Layers:
    """Deviations of the two ranks of a tensor-parallel group, without an engine."""

    architectures: dict[str, dict[str, float]]
    exchanged: tuple[dict[str, list[int]], int, int]
    exchanged_checkpointed: tuple[dict[str, list[int]], int, int]


def run_all() -> Results:
    from tests.helpers import megatron  # only here: megatron-core takes seconds to import

    bf16_alone = {name: run_case(case) for name, case in BF16_CASES.items()}
    layout.arrange(tensor=2)
    layout.make_sequence_groups([2])
    cases = {name: run_case(replace(case, tensor=2)) for name, case in CASES.items()}
    bf16 = {name: (bf16_alone[name], run_case(replace(case, tensor=2))) for name, case in BF16_CASES.items()}
    rounding = megatron.measure_stochastic_rounding()
    layout.arrange(tensor=4)
    return Results(cases, bf16, rounding, run_case(FOUR_RANK_CASE))


def compare_layers() -> Layers:
    from tests.helpers import megatron

    layout.arrange(tensor=2)
    architectures = {
        name: megatron.compare_with_hugging_face(config, **options) for name, (config, options) in ARCHITECTURES.items()
    }
    exchanged = [megatron.count_exchanged_elements(**options) for options in EXCHANGED.values()]
    return Layers(architectures, *exchanged)


@pytest.fixture(scope="module")
def results() -> list[Results]:
    return run_ranks(run_all, 4)


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
    model = StepModel(shape, parameter_counts(shape.take_tensor_shard(2)), settings, Cluster(GPUS["H100"], 4))
    for phase, phase_numels in expected.items():
        work = getattr(StepPasses.derive(settings), phase)
        traffic, num_exchanges = model.estimate_tensor_exchanges(work, num_tokens)
        assert num_exchanges == len(phase_numels)
        assert traffic.inside == 4 * sum(phase_numels) / 2  # half of the numbers stay on the rank


@pytest.mark.parametrize("name", BF16_CASES)
def test_bf16_is_about_as_close_to_the_reference_as_with_hugging_faces_layers(results, name):
    """The oracle computes in fp32, from the same weights."""
    for result in results:
        alone, parallel = result.bf16[name]
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
