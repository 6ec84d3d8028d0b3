"""The parts of a fidelity measurement: agreement, verdict, tables, JSON, the choice of sequences."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from vcore_ds.commands.fidelity import FidelityOptions, check_options, prepare_output
from vcore_ds.commands.fidelity.measure import choose_sequences
from vcore_ds.commands.fidelity.report import (
    Agreement,
    Estimate,
    FidelityReport,
    LowRankDirection,
    describe,
    judge,
    mean,
    measure_agreement,
    write_report,
)
from vcore_ds.common.errors import UserError

# ---- agreement -----------------------------------------------------------------------------------------------------


def test_agreement_by_hand() -> None:
    index = torch.tensor([0, 0, 0, 1, 1])
    reference = torch.tensor([1.0, 2.0, 2.0, 4.0, 0.0], dtype=torch.float64)
    utilities = torch.tensor([1.0, 2.0, 2.0, 0.0, 4.0])  # the second sequence the wrong way round
    weights = torch.tensor([0.5, 0.25, 0.25, 0.1, 0.9])
    reference_weights = torch.tensor([0.25, 0.5, 0.25, 0.9, 0.1])
    agreement = measure_agreement(utilities, reference, weights, reference_weights, index)
    assert agreement.relative_error == pytest.approx(math.sqrt(32 / 25))
    assert agreement.weight_overlap == pytest.approx((0.75 + 0.2) / 2)  # 1 - half of the absolute differences
    assert agreement.spearman_within_sequences == pytest.approx(0.0)  # +1 and -1
    assert agreement.spearman == pytest.approx(spearmanr(utilities, reference).statistic)


def test_a_sequence_of_constant_utilities_does_not_count() -> None:
    index, reference = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 2.0, 5.0, 6.0])
    uniform = torch.full((4,), 0.5)
    agreement = measure_agreement(torch.tensor([3.0, 3.0, 8.0, 9.0]), reference, uniform, uniform, index)
    assert agreement.spearman_within_sequences == pytest.approx(1.0) and agreement.weight_overlap == pytest.approx(1.0)
    nothing = measure_agreement(torch.zeros(4), torch.zeros(4), uniform, uniform, index)
    assert nothing.spearman is None and nothing.spearman_within_sequences is None and nothing.relative_error is None
    assert mean([]) is None


# ---- verdict and tables ----------------------------------------------------------------------------------------------

RECIPE = {"model": {"path": "some/model"}, "lora": {"rank": 8}}
EPSILONS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


def make_report(
    jvp: float | None, *differences: float | None, recipe_epsilon: float | None = None, **changes
) -> FidelityReport:
    """Make a report with the Spearman correlations of jvp and of EPSILONS; `recipe_epsilon` is None for jvp."""

    def estimate(epsilon: float | None, spearman: float | None) -> Estimate:
        agreement = Agreement(spearman, spearman, 0.1, 0.95)
        measured = {} if epsilon is None else {"changed_fraction": 0.002, "signal_to_noise": 0.3}
        return Estimate(
            "jvp" if epsilon is None else "finite_difference",
            epsilon,
            agreement,
            **measured,
            of_recipe=epsilon == recipe_epsilon,
        )

    report = FidelityReport(
        recipe=RECIPE,
        environment={},
        precision="bf16",
        reference_precision="fp32",
        steps_before=0,
        direction="sgd",
        probe_batch_size=4,
        num_sequences=4,
        num_tokens=1000,
        utility_std=20.0,
        uniform_weight_overlap=0.88,
        loss_error_nats=0.07,
        estimators=[estimate(None, jvp), *map(estimate, EPSILONS, differences)],
    )
    return replace(report, **changes)


def test_the_verdict_names_the_settings_that_agree() -> None:
    one_epsilon = make_report(0.996, 0.450, 0.373, 0.946, 0.553, 0.109, 0.199)
    assert list(judge(one_epsilon)) == [
        "utility.estimator=jvp: Spearman 0.996",
        "utility.epsilon: 0.01 of those tried; best 0.01, 0.946",
    ]
    no_epsilon = make_report(0.97, 0.850, 0.666, 0.128, -0.004, 0.123, None)
    assert list(judge(no_epsilon))[1] == "utility.epsilon: none of those tried; best 1, 0.850"
    assert list(judge(make_report(None))) == ["utility.estimator=jvp: Spearman -"]
    report = make_report(0.996)
    ranks = [
        LowRankDirection(rank, 0.8, Agreement(0.999, within, 0.1, 0.97)) for rank, within in ((16, 0.98), (64, 0.992))
    ]
    assert list(judge(replace(report, low_ranks=ranks)))[1] == "probe.rank: at least 64"
    assert list(judge(replace(report, low_ranks=ranks[:1])))[1] == "probe.rank: none of those tried"


def test_the_tables_show_every_measurement() -> None:
    report = make_report(0.996, 0.95, None, recipe_epsilon=0.1)
    rows = [line.split() for line in describe(report).splitlines()]
    assert ["*finite_difference", "0.1", "-", "-", "0.1", "95.00%", "0.20%", "0.3"] in rows
    report = replace(report, low_ranks=[LowRankDirection(16, 0.812, Agreement(0.9991, None, 0.1, 0.97))])
    assert ["16", "81.2%", "0.9991", "-", "97.00%"] in [line.split() for line in describe(report).splitlines()]
    alone = describe(make_report(0.996))
    assert "Low-rank" not in alone and alone.endswith("jvp: Spearman 0.996")


# ---- files ---------------------------------------------------------------------------------------------------------


def test_the_json_has_null_for_undefined_numbers(tmp_path: Path) -> None:
    report = make_report(0.996, 0.9, math.nan, loss_error_nats=math.inf)
    write_report(report, tmp_path)
    written = json.loads((tmp_path / "fidelity.json").read_text(), parse_constant=pytest.fail)
    first, second, third = written["estimators"]
    assert first | {"spearman": 0.996, "estimator": "jvp", "epsilon": None, "changed_fraction": None} == first
    assert second | {"estimator": "finite_difference", "epsilon": 1.0, "spearman": 0.9, "relative_error": 0.1} == second
    assert third["spearman"] is None and written["loss_error_nats"] is None
    assert written["recipe"] == RECIPE and written["verdict"] == list(judge(report))
    with pytest.raises(UserError, match="holds a fidelity.json already"):
        prepare_output(tmp_path)


def test_an_output_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output: .*file is a file, not a folder"):
        prepare_output(tmp_path / "file")
    prepare_output(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()


# ---- choice of sequences ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_training", "num_trusted", "num_measured", "num_probe"),
    [(20, None, 4, 8), (9, None, 4, 5), (3, None, 2, 1), (2, None, 1, 1), (2, 6, 2, 6), (20, 3, 4, 3)],
)
def test_measured_and_probe_sequences_are_disjoint(
    num_training: int, num_trusted: int | None, num_measured: int, num_probe: int
) -> None:
    """4 measured and 8 in the probe are asked for."""
    measured, probe = choose_sequences(([num_training], [1]), num_trusted, 8, 4, 0)
    assert (len(set(measured)), len(set(probe))) == (num_measured, num_probe)
    if num_trusted is None:
        assert not {*measured} & {*probe} and {*measured, *probe} <= {*range(num_training)}
    else:
        assert {*measured} <= {*range(num_training)} and {*probe} <= {*range(num_trusted)}


def test_too_little_data_and_invalid_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"data.train_path: found 1 sequence .*at least 2"):
        choose_sequences(([1], [1]), None, 1, 4, 0)
    with pytest.raises(UserError, match=r"data.probe_path: found 0 sequences .*at least 1"):
        choose_sequences(([9], [1]), 0, 1, 4, 0)
    with pytest.raises(UserError, match="--epsilons -1, --epsilons nan, --ranks -2, --after-steps -1: expected pos"):
        check_options(FidelityOptions(epsilons=(-1.0, math.nan, 1.0), ranks=(-2,), after_steps=-1))
    with pytest.raises(UserError, match="--sequences 0"):
        check_options(FidelityOptions(num_sequences=0))
