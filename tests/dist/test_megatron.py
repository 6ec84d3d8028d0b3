"""Parallel layers on 4 ranks against the Hugging Face model in one process, quantity by quantity.

Two ranks share every layer, and two such pairs, or pairs of pairs that share their rows, make the ZeRO-3 shards.
"""

from dataclasses import replace

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.helpers import step_runs
from tests.helpers.parity import Case, assert_equal, run_case
from tests.helpers.ranks import run_ranks
from vcore_ds.distributed import layout

pytestmark = pytest.mark.dist


def sections(clipping: float | None = None, **others) -> dict:
    """Of a recipe with SGD: Adam moves a parameter whose gradient is near zero by the sign of its rounding. Steps of
    this length move parameters by a thousand times the bound on their deviation."""
    optimizer = {"learning_rate": 0.1, "name": "sgd", "gradient_clipping": clipping}
    return {"optimizer": optimizer, **others}


SEPARATE = {"utility": {"fused": False}}
FINITE_DIFFERENCE = {"utility": {"estimator": "finite_difference", "epsilon": 5.0}}
ADAM = {"learning_rate": step_runs.LEARNING_RATE, "eps": 1e-3}
VARIANCE = {"kl_budget": 0.3, "alpha": "variance", "alpha_cap": None}
BATCH_WIDE = {"kl_budget": 0.05, "scope": "sequence_and_batch", "batch_kl_budget": 0.1}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES = {
    "sft, packed": Case(packed=True, sections=sections(method={"name": "sft"})),
    "dft": Case(sections=sections(method={"name": "dft"})),
    "jvp": Case(sections=sections()),
    "jvp, packed, tied, checkpointed": Case(packed=True, tied=True, checkpointing=True, sections=sections()),
    "jvp, separate passes, tied, checkpointed": Case(tied=True, checkpointing=True, sections=sections(**SEPARATE)),
    "jvp, padded vocabulary, packed": Case(vocabulary=121, packed=True, sections=sections()),
    "jvp, padded vocabulary, tied, one reduction": Case(vocabulary=121, tied=True, coalesce=True, sections=sections()),
    "finite difference": Case(sections=sections(**FINITE_DIFFERENCE)),
    "finite difference, packed, tied": Case(packed=True, tied=True, sections=sections(**FINITE_DIFFERENCE)),
    "direction adam, clipped probe, variance": Case(
        sections={"optimizer": ADAM, "method": VARIANCE, "probe": {"direction": "adam", "clip": 0.1}}
    ),
    "clipped": Case(sections=sections(clipping=0.1, probe={"clip": 0.1})),
    "clipped, offloaded optimizer": Case(sections=sections(clipping=0.1), config=OFFLOAD),
    "sequences and batch": Case(num_main=7, without_tokens=(2,), sections=sections(method=BATCH_WIDE)),
    "ranks without sequences": Case(num_main=5, num_probe=1, sections=sections()),
    "ranks that share rows": Case(sequence_parallel=(2, 2), sections=sections()),
    "ranks that share rows, packed, checkpointed": Case(
        sequence_parallel=(2, 1), packed=True, checkpointing=True, sections=sections(**SEPARATE)
    ),
}
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
ARCHITECTURES = {
    "Qwen3": Qwen3Config(**SIZES, head_dim=16),
    "Qwen2, with a window in one layer": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "Llama 3, scaled positions": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "Mistral, with a window": MistralConfig(**SIZES, sliding_window=5),
}


def run_all() -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    from tests.helpers.megatron import compare_with

    layout.arrange(tensor=2)
    layout.make_sequence_groups([2], timeout_minutes=10)
    families = {name: compare_with(config) for name, config in ARCHITECTURES.items()}
    return families, {name: run_case(replace(case, tensor=2)) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> list[tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]]:
    return run_ranks(run_all, 4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_losses_and_gradients_equal_those_of_hugging_face(found, name):
    for families, _ in found:
        print(name, families[name])
        assert families[name]["losses"] < 2e-6
        assert families[name]["gradient"] < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_step_equals_reference(found, name):
    of_ranks = [of_cases[name] for _, of_cases in found]
    assert_equal(of_ranks)
    for worst in of_ranks:
        assert worst["norm"] < 1e-5
        assert worst["drift"] == 0
