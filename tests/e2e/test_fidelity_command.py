"""`vcore-ds fidelity` on one process and on two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import ForkedJob
from tests.helpers.setups import TinySetup
from vcore_ds.commands.cli import main

pytestmark = pytest.mark.e2e

RECIPE = "launch_scripts/recipes/quickstart.yaml"


def run_fidelity(arguments: list[str], log: Path, *, num_ranks: int = 1, code: int = 0) -> str:
    """Run the command; returns its output. `code`: the expected exit code."""
    with ForkedJob(main, ["fidelity", RECIPE, *arguments], log, num_ranks=num_ranks) as job:
        assert job.wait() == code, job.output
    assert "Traceback" not in job.output
    return job.output


def read_report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "fidelity.json").read_text(), parse_constant=pytest.fail)


def by_epsilon(report: dict[str, Any]) -> dict[float | None, dict[str, Any]]:
    """Epsilon, None for JVP -> results of the estimator."""
    return {result["epsilon"]: result for result in report["estimators"]}


def test_two_ranks_measure_the_same_as_one_process(setup: TinySetup, tmp_path: Path) -> None:
    recipe = setup.overrides(tmp_path / "run", "lora=null", "probe.direction=sgd", "probe.clip=null")
    estimator = ["utility.estimator=finite_difference", "utility.epsilon=3e-3"]
    options = "--after-steps 1 --epsilons 1e-2 1e-8".split()  # overrides may follow a list
    one, two = tmp_path / "one", tmp_path / "two"
    output_text = run_fidelity([*recipe, *options, *estimator, "--output", str(one)], tmp_path / "one.log")
    run_fidelity([*recipe, *options, *estimator, "--output", str(two)], tmp_path / "two.log", num_ranks=2)
    single, double = read_report(one), read_report(two)

    assert (single["precision"], single["reference_precision"]) == ("fp32", "fp64")
    assert single["environment"]["world_size"] == 1 and double["environment"]["world_size"] == 2
    assert single["num_sequences"] == 4 and single["num_tokens"] == double["num_tokens"] > 40
    assert single["recipe"]["utility"]["epsilon"] == 3e-3
    assert double["utility_std"] == pytest.approx(single["utility_std"], rel=1e-3) and single["utility_std"] > 0
    assert list(by_epsilon(single)) == list(by_epsilon(double)) == [None, 1e-2, 3e-3, 1e-8]
    assert [result["epsilon"] for result in single["estimators"] if result["is_selected"]] == [3e-3]
    for report in (single, double):
        jvp, long, recipe_epsilon, short = by_epsilon(report).values()
        assert jvp["estimator"] == "jvp" and long["estimator"] == "finite_difference"
        assert jvp["spearman"] > 0.9999 and jvp["relative_error"] < 1e-4 and jvp["weight_overlap"] > 0.9999
        # In fp32 the error of a finite difference still falls with its step, as in exact arithmetic.
        assert 0 < recipe_epsilon["relative_error"] < 0.5 * long["relative_error"]
        assert recipe_epsilon["spearman"] > 0.99
        # Differences over this step are lost in rounding.
        assert short["signal_to_noise"] < recipe_epsilon["signal_to_noise"] and short["spearman"] < 0.9
        assert 0 < short["changed_fraction"] < 1
    for words in ("Spearman", "*finite_difference", *single["verdict"]):
        assert words in output_text
    assert not (tmp_path / "run").exists()  # measuring does not begin a run


def test_fidelity_of_a_recipe_without_utilities_in_bf16(setup: TinySetup, tmp_path: Path) -> None:
    output = tmp_path / "fidelity"
    changes = "utility.estimator=finite_difference utility.epsilon=auto utility.rounding=stochastic".split()
    changes.append(f"data.probe_path={setup.validation}")
    arguments = ["methods/sft.yaml", *setup.overrides(tmp_path / "run", *changes, precision="bf16"), "lora=null"]
    arguments += ["--epsilons", "1e-5", "--ranks", "4", "64", "--output", str(output)]
    output_text = run_fidelity(arguments, tmp_path / "log", num_ranks=2)
    report = read_report(output)
    assert report["recipe"]["method"]["name"] == "sft" and "method.name=vcore in place of sft" in output_text
    assert report["probe_batch_size"] == 2
    jvp, fp8, searched, short = report["estimators"]
    assert jvp["spearman"] > 0.95 and 0 < jvp["relative_error"] < 0.1
    assert fp8["spearman"] > 0.9 and jvp["relative_error"] < fp8["relative_error"] < 0.3
    assert [result["is_selected"] for result in report["estimators"]] == [False, False, True, False]
    assert f"search for epsilon: {searched['epsilon']:.3g}" in output_text
    assert searched["signal_to_noise"] > short["signal_to_noise"] and searched["spearman"] > 0.5
    assert short["spearman"] is None or abs(short["spearman"]) < 0.5
    low, larger_than_any_matrix = report["low_ranks"]
    assert low["rank"] == 4 and 0.3 < low["energy"] < 1 and 0.3 < low["spearman"] < 1
    assert larger_than_any_matrix["energy"] == pytest.approx(1.0, abs=1e-3)
    assert larger_than_any_matrix["spearman"] == pytest.approx(1.0, abs=1e-6)
    assert "Low-rank direction" in output_text

    again = run_fidelity(arguments, tmp_path / "again.log", code=2)
    assert f"--output: {output}/fidelity.json: is there already" in again
