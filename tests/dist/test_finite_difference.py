"""Finite differences on 2 ranks: stochastic rounding, the search for epsilon, and its state between steps."""

import pytest
import torch
from scipy.stats import spearmanr

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.data.batches import StepBatches
from vcore_ds.distributed import layout
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import (
    FiniteDifference,
    choose_epsilon,
    compute_jvp_utilities,
    perturb_parameters,
    round_stochastically,
)

pytestmark = pytest.mark.dist


def make_engine(precision: str):
    recipe = step_runs.make_recipe(
        model={"path": "none", "precision": precision}, utility={"estimator": "finite_difference", "epsilon": "auto"}
    )
    return recipe, step_runs.make_engine(tiny.token_loss_model(hidden_size=64, intermediate_size=128), recipe)


def take_direction(engine) -> Direction:
    direction = Direction(engine)
    direction.compute(step_runs.deal(tiny.make_batch(8, seed=9), 2), normalization="sequence", clip=None)
    return direction


def join_shards(engine) -> torch.Tensor:
    return torch.cat([p.ds_tensor.data[: engine.shards.numel(p)].float() for _, p in engine.trainable])


def check_stochastic_perturbation() -> dict[str, float]:
    """Compare the mean of many stochastic perturbations, and the nearest-rounded one, with the exact perturbation."""
    _, engine = make_engine("bf16")
    direction = take_direction(engine)
    before = join_shards(engine)
    v = torch.cat([direction.shard(p)[: engine.shards.numel(p)].float() for _, p in engine.trainable])
    epsilon = 1e-3
    exact_shift = -epsilon * v.double()
    total, num_draws, changed = torch.zeros_like(exact_shift), 400, []
    for seed in range(num_draws):
        with perturb_parameters(engine, direction, epsilon, stochastic_rounding_seed=seed) as changed_fraction:
            total += join_shards(engine).double() - before.double()
        changed.append(changed_fraction)
    with perturb_parameters(engine, direction, epsilon) as nearest:
        shift_of_nearest = join_shards(engine).double() - before.double()
    with perturb_parameters(engine, direction, epsilon, stochastic_rounding_seed=0):
        first = join_shards(engine)
    with perturb_parameters(engine, direction, 0.0, stochastic_rounding_seed=3) as nothing:
        pass
    result = dict(
        # Projections on the direction: 1 is a perturbation of the length that was asked for.
        stochastic=float((total / num_draws) @ exact_shift / exact_shift.square().sum()),
        nearest=float(shift_of_nearest @ exact_shift / exact_shift.square().sum()),
        changed=sum(changed) / num_draws,
        changed_by_nearest=nearest,
        changed_by_nothing=nothing,
        restored=bool(torch.equal(join_shards(engine), before)),
        first_numbers=first[:500].tolist(),
    )
    engine.close()
    return result


def check_epsilon_search(precision: str) -> dict[str, float]:
    """Correlations with the exact utilities at the chosen epsilon, at the best of a grid, and at the paper's."""
    _, engine = make_engine(precision)
    direction = take_direction(engine)
    batches = step_runs.deal(tiny.make_batch(8, seed=4), 2)
    exact = torch.cat(compute_jvp_utilities(engine, direction, batches, 1))

    def agreement(epsilon: float) -> float:
        forward = FiniteDifference(engine, direction, epsilon=epsilon).begin(batches)
        with engine.without_gradient():
            differences = torch.cat([forward.run(k).utilities for k in range(len(batches))])
        correlation = spearmanr(differences, exact).statistic
        return 0.0 if correlation != correlation else float(correlation)

    chosen = choose_epsilon(engine, direction, batches)
    result = dict(
        chosen=chosen,
        agreement=agreement(chosen),
        best_of_a_grid=max(agreement(10.0**exponent) for exponent in range(-6, 3)),
        at_the_papers=agreement(1e-4),
    )
    engine.close()
    return result


def check_steps_with_auto() -> list[dict[str, float]]:
    """Three steps: a search in the first, then perturbations of the same length while the gradient's norm changes."""
    recipe, engine = make_engine("fp32")
    estimator = step_runs.make_estimator(recipe, engine)
    steps = []
    for k in range(3):
        main, probe = tiny.make_batch(8, seed=k), tiny.make_batch(4, seed=80 + k)
        batches = StepBatches(step_runs.deal(main, 2), step_runs.deal(probe, 2))
        metrics = step_runs.train_step(engine, recipe, batches, estimator, learning_rate=1e-3, measure_noise=k == 0)
        steps.append({key: metrics.values[key] for key in ("epsilon", "direction_norm", "signal_to_noise")})
    engine.close()
    return steps


def check_everything() -> dict:
    return dict(
        rank=layout.rank("shards"),
        rounding=check_stochastic_perturbation(),
        search={precision: check_epsilon_search(precision) for precision in ("fp32", "bf16")},
        steps=check_steps_with_auto(),
    )


@pytest.fixture(scope="module")
def checks() -> list[dict]:
    results = run_ranks(check_everything, 2)
    for result in results:
        rounding = {key: value for key, value in result["rounding"].items() if key != "first_numbers"}
        print(rounding, result["search"], result["steps"])
    return results


def test_stochastic_rounding_is_unbiased_and_goes_to_a_neighbour() -> None:
    generator = torch.Generator().manual_seed(0)
    # bf16 numbers near 1 are 1/128 apart: a fifth of the way up, and the same below zero; and bf16 numbers themselves.
    values = torch.tensor([1 + 0.2 / 128, -1 - 0.2 / 128, 0.0, -3.0, 1e-30])
    drawn = torch.stack([round_stochastically(values, generator) for _ in range(20_000)])
    assert torch.equal(drawn, drawn.bfloat16().float())
    assert set(drawn[:, 0].tolist()) == {1.0, 1 + 1 / 128} and set(drawn[:, 1].tolist()) == {-1.0, -1 - 1 / 128}
    assert set(drawn[:, 2].tolist()) == {0.0} and set(drawn[:, 3].tolist()) == {-3.0}
    assert float((drawn[:, 0] - 1).mean() * 128) == pytest.approx(0.2, abs=0.015)
    assert float(drawn.double().mean(0)[4]) == pytest.approx(1e-30, rel=1e-3)


def test_a_stochastic_perturbation_has_the_length_that_nearest_rounding_loses(checks) -> None:
    for result in checks:
        measured = result["rounding"]
        assert measured["stochastic"] == pytest.approx(1.0, abs=0.02)
        assert abs(measured["nearest"] - 1) > 0.1  # otherwise stochastic rounding has nothing to improve
        assert 0 < measured["changed_by_nearest"] < measured["changed"] < 1
        assert measured["changed_by_nothing"] == 0.0 and measured["restored"]


def test_ranks_round_independently(checks) -> None:
    first, second = (result["rounding"]["first_numbers"] for result in checks)
    assert first != second


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_chosen_epsilon_is_about_the_best_of_a_grid(checks, precision: str) -> None:
    for result in checks:
        measured = result["search"][precision]
        assert measured["chosen"] == checks[0]["search"][precision]["chosen"]
        assert measured["agreement"] > measured["best_of_a_grid"] - 0.03
        if precision == "bf16":
            assert measured["agreement"] > measured["at_the_papers"] + 0.3


def test_the_length_of_the_perturbation_stays_the_same_between_steps(checks) -> None:
    for result in checks:
        displacements = [step["epsilon"] * step["direction_norm"] for step in result["steps"]]
        assert displacements == pytest.approx([displacements[0]] * 3, rel=1e-6)
        assert len({step["epsilon"] for step in result["steps"]}) == 3
        assert [step["signal_to_noise"] is None for step in result["steps"]] == [False, True, True]
        assert result["steps"][0]["signal_to_noise"] > 3
