"""Steps of every method on 1 and 2 ranks of ZeRO-3 against the plain single-process reference, quantity by quantity."""

from dataclasses import replace

import pytest

from tests.helpers import step_runs, tiny, weightings
from tests.helpers.parity import Case, assert_parity, run_case
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

# A difference of two fp32 losses has a rounding error of 1e-7 / epsilon, so epsilon is large here. Convergence to the
# derivative as epsilon falls is tested in fp64 (tests/unit/test_estimators.py).
SEPARATE = {"utility": {"fused": False}}
FINITE_DIFFERENCE = {"utility": {"estimator": "finite_difference", "epsilon": 5.0}}
SGD = {"optimizer": {"learning_rate": step_runs.LEARNING_RATE, "name": "sgd"}}
MUON = {"name": "muon", "learning_rate": step_runs.LEARNING_RATE, "weight_decay": 0.1}
BATCH_WIDE = {"kl_budget": 0.05, "scope": "sequence_and_batch", "batch_kl_budget": 0.1}
CASES = {
    "full": Case(),
    "full, tied, checkpointed": Case(tied=True, checkpointing=True, coalesce=True),
    "full, tied, checkpointed, merged passes": Case(
        tied=True, checkpointing=True, batches_per_utility_pass=2, sections=SEPARATE
    ),
    "lora, tied, checkpointed, separate passes": Case(
        lora=True, tied=True, checkpointing=True, persistence_threshold=100_000, sections=SEPARATE
    ),
    "MoE model, idle experts": Case(moe_kind="qwen3_moe, idle experts", coalesce=True),
    "MoE model, latent attention, checkpointed": Case(moe_kind="deepseek_v3", checkpointing=True),
    "MoE model, idle experts, lora on experts, checkpointed": Case(
        moe_kind="qwen3_moe, idle experts", lora=True, checkpointing=True
    ),
    "finite difference": Case(sections=FINITE_DIFFERENCE),
    "token normalization, fixed temperature, alpha none, clipped": Case(
        sections={
            "method": {"temperature": 0.7, "normalization": "token", "alpha": "none"},
            "optimizer": {"learning_rate": step_runs.LEARNING_RATE, "gradient_clipping": 0.1},
        }
    ),
    "sft": Case(sections={"method": {"name": "sft"}}),
    "alpha variance, micro-batches, capped": Case(
        sections={
            "method": {"kl_budget": 0.3, "alpha": "variance", "alpha_scope": "micro_batch"},
            "batch": {"micro_batch_size_per_rank": 2},
        }
    ),
    "released code's reading": Case(
        without_tokens=(1, 3, 5, 7),
        sections={
            "method": {"temperature": 0.5, "normalization": "token", "alpha_scope": "micro_batch"},
            "probe": {"clip": 1.0},
        },
    ),
    "direction adam, lora, one probe for two steps": Case(
        lora=True, probe_every=2, sections={"probe": {"direction": "adam", "clip": 1.0}}
    ),
    "muon": Case(sections={"optimizer": MUON, "probe": {"direction": "muon", "clip": 1.0}}),
    "muon, MoE model": Case(moe_kind="qwen3_moe, idle experts", sections={"optimizer": MUON}),
    "base measure and probe loss dft, alpha effective sample size": Case(
        sections={
            "method": {"kl_budget": 0.1, "base_measure": "dft", "alpha": "effective_sample_size"},
            "probe": {"loss": "dft", "clip": 1.0},
        }
    ),
    "sequences and batch": Case(num_main=7, without_tokens=(2,), sections={"method": BATCH_WIDE}),
    "sequences and batch, token normalization, base measure dft, lora": Case(
        lora=True,
        batches_per_utility_pass=2,
        sections={
            "method": {**BATCH_WIDE, "normalization": "token", "base_measure": "dft", "alpha": "variance"},
            **SGD,
        },
    ),
    "a rank without probe sequences, an idle micro-batch, alpha without a cap": Case(
        num_probe=1, num_main=5, sections={"method": {"kl_budget": 0.05, "alpha_cap": None}}
    ),
}


METHODS = ("vcore", "sft", "dft", "iw_sft", "random", "asft", "eaft", "deft", "profit", "stored", "custom")
SETTINGS = {
    "vcore": {"kl_budget": 0.1},
    # The step's rate is small: with the usual weight the divergence would have no part in the gradient.
    "asft": {"kl_weight": 100.0},
    "profit": {"min_probability": 1 / tiny.VOCABULARY},
    "custom": weightings.FOCAL,
}


def make_method_case(number: int, lora: bool, num_micro_batches: int = 2) -> Case:
    """A case of a method that follows traces. The second step has iw-SFT's ratio no longer at 1, and a state of Adam;
    both normalizations alternate, so that each meets every method and adapters."""
    method = METHODS[number]
    files = {"iw_sft": {} if lora else {"reference_log_probabilities": "none"}, "stored": {"token_weights": "none"}}
    sections = {
        "method": {"name": method, "normalization": ("token", "sequence")[(number + lora + num_micro_batches) % 2]}
        | SETTINGS.get(method, {}),
        "probe": {"direction": "adam"},
        "data": {"train_path": "none", **files.get(method, {})},
        # An entry whose gradient is about as small as eps moves by its rounding, which differs between processors: with
        # 1e-6, by 4e-5 on a Xeon with AMX.
        "optimizer": {"learning_rate": step_runs.LEARNING_RATE, "eps": 1e-4},
    }
    sections |= {"lora": {"rank": 4, "alpha": 8}} if lora else {}
    return Case(lora=lora, follows=True, num_main=4 * num_micro_batches, sections=sections)


METHOD_CASES = {
    f"{method}, {'lora' if lora else 'full'}": make_method_case(number, lora)
    for number, method in enumerate(METHODS)
    for lora in (False, True)
    if lora or method != "asft"
}
WITH_ADAPTERS = ("vcore", "asft", "iw_sft")
"""Methods whose steps treat adapters in a special way: with adapters on two ranks too, the others on one alone."""
CASES |= {name: case for name, case in METHOD_CASES.items() if not case.lora}
CASES |= {f"{method}, lora": make_method_case(METHODS.index(method), True, 1) for method in WITH_ADAPTERS}


def run_all_cases() -> dict[str, dict[str, float]]:
    return {name: run_case(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def deviations() -> list[dict[str, dict[str, float]]]:
    return run_ranks(run_all_cases, 2)


ONE_RANK_CASES = {name: case for name, case in CASES.items() if name.startswith(("base", "sequences", "muon"))}
ONE_RANK_CASES |= {name: case for name, case in METHOD_CASES.items() if case.lora}


def run_cases_on_one_rank() -> dict[str, dict[str, float]]:
    """Run the cases on one rank with two micro-batches, as on each of two ranks."""
    return {
        name: run_case(case if case.num_main < 8 else replace(case, num_main=4))
        for name, case in ONE_RANK_CASES.items()
    }


@pytest.fixture(scope="module")
def deviations_on_one_rank() -> list[dict[str, dict[str, float]]]:
    return run_ranks(run_cases_on_one_rank, 1)


@pytest.mark.parametrize("name", ONE_RANK_CASES)
def test_step_on_one_rank_equals_reference(deviations_on_one_rank, name):
    assert_parity_of_method([result[name] for result in deviations_on_one_rank], name)


@pytest.mark.parametrize("name", CASES)
def test_step_on_two_ranks_equals_reference(deviations, name):
    assert_parity_of_method([result[name] for result in deviations], name)


def assert_parity_of_method(deviations_by_rank: list[dict[str, float]], name: str) -> None:
    assert_parity(deviations_by_rank)
    if name not in METHOD_CASES:
        return
    method = name.split(",")[0]
    for worst in deviations_by_rank:
        quantities = {quantity for quantity in worst if quantity.startswith("followed ")}
        assert len(quantities) == (4 if method == "vcore" else 3)
        assert all(worst[quantity] < 1e-5 for quantity in quantities) and worst.get("base_kl", 0.0) < 1e-5
        # The weights of these do not sum to 1; if they did, the method would not have been in effect.
        if method in ("dft", "asft", "deft", "profit", "custom"):
            assert 0 < worst["total_weight"] < 0.99
        if method in ("iw_sft", "eaft", "stored"):
            assert abs(worst["total_weight"] - 1.0) > 1e-5
