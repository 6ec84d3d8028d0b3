"""Every method x {LoRA, full} x {1, 2 ranks} x {1, 2 micro-batches per rank} against the single-process reference."""

import itertools

import pytest
import torch

from tests.helpers import step_runs, tiny
from tests.helpers.parity import PREPARE
from tests.helpers.ranks import run_ranks
from tests.helpers.soak import IS_SOAK
from vcore_ds.data.batches import StepBatches
from vcore_ds.distributed import layout
from vcore_ds.training.followed import FollowedTraces, measure_followed
from vcore_ds.training.token_records import SequenceTokens
from vcore_ds.training.weighting import compute_log_probabilities

pytestmark = pytest.mark.dist

METHODS = ("vcore", "sft", "dft", "iw_sft", "random", "asft", "eaft", "deft", "profit", "stored")
SECTIONS = {
    "vcore": {"kl_budget": 0.1},
    # The step's rate is small: with the usual weight the divergence would have no part in the gradient.
    "asft": {"kl_weight": 100.0},
    "profit": {"min_probability": 1 / tiny.VOCABULARY},
}
NUM_STEPS = 2
"""In the second step iw-SFT's ratio is no longer 1, and Adam has a state."""


def make_recipe(method: str, lora: bool, normalization: str):
    section = {"name": method, "normalization": normalization} | SECTIONS.get(method, {})
    files = {"iw_sft": {} if lora else {"reference_log_probabilities": "none"}, "stored": {"token_weights": "none"}}
    return step_runs.make_recipe(
        method=section,
        probe={"direction": "adam"},
        data={"train_path": "none", **files.get(method, {})},
        lora={"rank": 4, "alpha": 8} if lora else None,
        # With 1e-8, an entry whose gradient is about as small moves by its rounding: 1.8e-6 in two of these runs.
        optimizer={"learning_rate": step_runs.LEARNING_RATE, "eps": 1e-6},
    )


def run_combination(method: str, lora: bool, num_micro_batches: int, normalization: str) -> dict[str, float]:
    """Take the steps of one combination; returns the largest deviation of each quantity."""
    recipe = make_recipe(method, lora, normalization)
    model = tiny.token_loss_model(lora=lora)
    plain = tiny.qwen3()
    reference = step_runs.make_reference(tiny.with_lora(plain) if lora else plain, recipe)
    engine = step_runs.make_engine(model, recipe)
    estimator = step_runs.make_estimator(recipe, engine)
    num_rows = 2 * num_micro_batches * layout.size("shards")
    mains = [tiny.make_batch(num_rows, seed=30 + k) for k in range(NUM_STEPS)]
    if method == "iw_sft" and not lora:
        for main in mains:  # as `vcore-ds reference` does, but each rank computes all rows
            rows = [tiny.take_rows(main, [row]) for row in range(num_rows)]
            main.reference_log_probability = torch.cat(compute_log_probabilities(engine, rows))
    followed = tiny.make_batch(3, seed=90)
    followed_masks = PREPARE[method](followed) if method in PREPARE else None
    if method == "iw_sft" and not lora:
        alone = [tiny.take_rows(followed, [row]) for row in range(3)]
        followed.reference_log_probability = torch.cat(compute_log_probabilities(engine, alone))
    worst: dict[str, float] = dict.fromkeys(("weights", "alpha", "gradient", "parameters", "loss", "base_kl"), 0.0)
    for k, main in enumerate(mains):
        masks = PREPARE[method](main) if method in PREPARE else None
        probe = tiny.make_batch(4, seed=70 + k)
        batches = StepBatches(step_runs.deal(main, 2), step_runs.deal(probe, 2) if method == "vcore" else [])
        assert len(batches.main) == num_micro_batches
        recorded = step_runs.Recorder(engine)
        metrics = step_runs.train_step(engine, recipe, batches, estimator, recorded)
        followed_options = dict(followed=followed, followed_kept=followed_masks) if k == NUM_STEPS - 1 else {}
        expected = step_runs.reference_step(
            reference, main, probe, kept=masks, **followed_options, **step_runs.reference_options(recipe)
        )
        deviations = {
            "weights": max(
                step_runs.relative_error(weights, expected["weights"][i])
                for i, (_, weights) in recorded.by_sequence(batches.main).items()
            ),
            "alpha": abs(metrics.values["alpha"] - expected["alpha"]),
            "loss": abs(metrics.values["loss"] - expected["loss"]),
            "gradient": step_runs.relative_error(
                torch.cat([recorded.gradient[name].flatten() for name in expected["gradient"]]),
                torch.cat([g.flatten() for g in expected["gradient"].values()]),
            ),
            "parameters": max(
                float((parameter - expected["parameters"][name]).abs().max())
                for name, parameter in step_runs.gather_parameters(engine).items()
            ),
        }
        if method == "asft":
            deviations["base_kl"] = abs(metrics.values["base_kl"] / expected["base_kl"] - 1)
        for name, deviation in deviations.items():
            assert deviation == deviation, f"{name} is NaN"
            worst[name] = max(worst[name], deviation)
        if k == NUM_STEPS - 1:
            traces = FollowedTraces([("training data", i) for i in range(3)], step_runs.deal(followed, 2))
            measured = measure_followed(engine, recipe.method, traces, estimator, seed=0)
            worst |= measure_followed_deviations(measured, expected["followed"])
            worst["total_weight"] = metrics.values["total_weight"]
    engine.close()
    return worst


def measure_followed_deviations(
    measured: dict[int, SequenceTokens], expected: list[dict[str, torch.Tensor]]
) -> dict[str, float]:
    """Largest deviation of each quantity of the followed rows that this rank has measured."""
    assert sorted(measured) == list(range(layout.rank("shards"), 3, layout.size("shards")))
    worst: dict[str, float] = {}
    for index, trace in measured.items():
        for name, expected_values in expected[index].items():
            values = getattr(trace, name)
            assert (values is None) == (expected_values is None)
            if expected_values is not None:
                deviation = step_runs.relative_error(torch.from_numpy(values), expected_values)
                worst[f"followed {name}"] = max(worst.get(f"followed {name}", 0.0), deviation)
    return worst


COMBINATIONS = [
    # Both normalizations, alternating, so that each meets every method, adapters, ranks and micro-batches.
    (method, lora, num_micro_batches, ("token", "sequence")[(i + lora + (num_micro_batches > 1)) % 2])
    for i, method in enumerate(METHODS)
    for lora, num_micro_batches in itertools.product((False, True), (1, 2))
    if lora or method != "asft"
]


def describe(combination: tuple[str, bool, int, str]) -> str:
    method, lora, num_micro_batches, normalization = combination
    return f"{method}-{'lora' if lora else 'full'}-x{num_micro_batches}-{normalization}"


def list_combinations(world_size: int) -> list[tuple[str, bool, int, str]]:
    """List the combinations. Without `make soak` each method has adapters on one rank and all parameters on two; the
    methods whose steps treat adapters in a special way have adapters on two ranks too."""
    chosen = {1: [(True, 2)], 2: [(False, 2)]}[world_size]
    with_adapters = [one for one in COMBINATIONS if one[0] in ("vcore", "asft", "iw_sft") and one[1:3] == (True, 1)]
    return [one for one in COMBINATIONS if IS_SOAK or one[1:3] in chosen or (world_size == 2 and one in with_adapters)]


def run_all() -> dict[tuple, dict[str, float]]:
    return {combination: run_combination(*combination) for combination in list_combinations(layout.size("shards"))}


@pytest.fixture(scope="module")
def deviations() -> dict[int, list[dict[tuple, dict[str, float]]]]:
    return {world_size: run_ranks(run_all, world_size) for world_size in (1, 2)}


@pytest.mark.parametrize(
    "world_size, combination",
    [
        pytest.param(world_size, one, id=f"{describe(one)}-{world_size}")
        for world_size in (1, 2)
        for one in list_combinations(world_size)
    ],
)
def test_a_step_of_every_combination_equals_the_reference(deviations, world_size, combination):
    for rank, by_combination in enumerate(deviations[world_size]):
        worst = by_combination[combination]
        print(f"rank {rank}: " + "  ".join(f"{name} {value:.1e}" for name, value in worst.items()))
        followed_quantities = {name for name in worst if name.startswith("followed ")}
        assert len(followed_quantities) == (4 if combination[0] == "vcore" else 3)
        for quantity in ("weights", "alpha", "gradient", "loss", "base_kl", *followed_quantities):
            assert worst[quantity] < 1e-5, quantity
        assert worst["parameters"] < 1e-6
        # The weights of these do not sum to 1; if they did, the method would not have been in effect.
        if combination[0] in ("dft", "asft", "deft", "profit"):
            assert 0 < worst["total_weight"] < 0.99
        if combination[0] in ("iw_sft", "eaft", "stored"):
            assert abs(worst["total_weight"] - 1.0) > 1e-5
