"""The parts of a fidelity measurement: agreement, verdict, tables, options, the choice of sequences."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from vcore_ds.commands.cli import main
from vcore_ds.commands.fidelity.measure import (
    EstimatorAgreement,
    FidelityReport,
    LowRankDirection,
    choose_sequences,
    describe,
    judge,
    measure_agreement,
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


# ---- verdict and tables ----------------------------------------------------------------------------------------------

REPORT = FidelityReport(
    recipe={},
    environment={},
    precision="bf16",
    reference_precision="fp32",
    steps_before=0,
    direction="sgd",
    probe_batch_size=4,
    num_sequences=4,
    num_tokens=1000,
)


def make_report(jvp: float | None, *differences: float | None, within: tuple[float | None, ...] = ()) -> FidelityReport:
    """Make a report with the Spearman correlations of jvp, of epsilons 1, 0.1, ..., and of ranks 16, 32, ..."""
    estimators = [EstimatorAgreement(jvp, jvp, 0.1, 0.95, estimator="jvp")]
    for k, spearman in enumerate(differences):
        measured = dict(epsilon=10.0**-k, changed_fraction=0.002, signal_to_noise=0.3, is_selected=k == 1)
        estimators.append(EstimatorAgreement(spearman, spearman, 0.1, 0.95, estimator="finite_difference", **measured))
    low_ranks = [
        LowRankDirection(0.9991, value, 0.1, 0.97, rank=16 * 2**k, energy=0.812) for k, value in enumerate(within)
    ]
    return replace(REPORT, estimators=estimators, low_ranks=low_ranks)


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (make_report(0.996, 0.45, 0.37, 0.946), "utility.epsilon: 0.01 of those tried; best 0.01, 0.946"),
        (make_report(0.97, 0.85, 0.67, None), "utility.epsilon: none of those tried; best 1, 0.850"),
        (make_report(None), "utility.estimator=jvp: Spearman -"),
        (make_report(0.996, within=(0.98, 0.992)), "probe.rank: at least 32"),
        (make_report(0.996, within=(0.98, None)), "probe.rank: none of those tried"),
    ],
)
def test_the_verdict_names_the_settings_that_agree(report: FidelityReport, verdict: str) -> None:
    assert judge(report)[-1] == verdict and describe(report).endswith(verdict)


def test_the_tables_show_every_measurement() -> None:
    rows = [line.split() for line in describe(make_report(0.996, 0.95, None, within=(None,))).splitlines()]
    assert ["*finite_difference", "0.1", "-", "-", "0.1", "95.00%", "0.20%", "0.3"] in rows
    assert ["16", "81.2%", "0.9991", "-", "0.1", "97.00%"] in rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epsilons", "-1", "nan", "1", "--ranks", "-2"], "--epsilons -1, --epsilons nan, --ranks -2"),
        (["--sequences", "0"], "--sequences: found 0"),
        (["--after-steps", "-1"], "--after-steps: found -1"),
        (["--output", "file"], "--output: file"),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    try:
        code = main(["fidelity", "quickstart", *words])
    except SystemExit as ended:  # of argparse
        code = ended.code
    assert code == 2 and message in capsys.readouterr().err


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


def test_too_little_data_is_refused() -> None:
    with pytest.raises(UserError, match="data.train_path: found too few"):
        choose_sequences(([1], [1]), None, 1, 4, 0)
    with pytest.raises(UserError, match="data.probe_path: found too few"):
        choose_sequences(([9], [1]), 0, 1, 4, 0)
