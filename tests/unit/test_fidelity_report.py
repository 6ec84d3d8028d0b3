"""The parts of a fidelity measurement: agreement, verdict, tables, JSON, the choice of sequences."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from vcore_ds.commands.fidelity import (
    FidelityOptions,
    check_options,
    choose_sequences,
    limit_to_recipe,
    prepare_output,
)
from vcore_ds.commands.fidelity.report import (
    Agreement,
    Estimate,
    FidelityReport,
    LowRankDirection,
    ProbeSize,
    StaleDirection,
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
        large_probe_size=64,
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
    sizes = [
        ProbeSize(1, 4, 0.3, 0.1, 0.9),
        ProbeSize(8, 4, 0.85, 0.8, 0.97, of_recipe=True),
        ProbeSize(32, 1, 0.95, 0.95, 0.99),
    ]
    # A later agreement, by chance, does not count.
    stale = [StaleDirection(steps, spearman, 0.9) for steps, spearman in ((1, 0.99), (2, 0.93), (4, 0.7), (8, 0.91))]
    report = make_report(0.996, probe_sizes=sizes, stale_directions=stale)
    assert list(judge(report))[1:] == ["probe.batch_size: at least 32", "probe.every: at most 2"]
    ranks = [LowRankDirection(16, 0.8, 0.999, 0.98, 0.97), LowRankDirection(64, 0.9, 0.999, 0.992, 0.99)]
    assert list(judge(replace(report, low_ranks=ranks)))[1] == "probe.rank: at least 64"
    assert list(judge(replace(report, low_ranks=ranks[:1])))[1] == "probe.rank: none of those tried"
    report = replace(report, probe_sizes=sizes[:2], stale_directions=stale[2:])
    assert list(judge(report))[1:] == ["probe.batch_size: none of those tried", "probe.every: at most 1"]


def test_the_tables_show_every_measurement() -> None:
    sizes = [ProbeSize(1, 4, 0.3, 0.1, 0.9), ProbeSize(4, 4, 0.7, 0.6, 0.97, of_recipe=True)]
    dft_size = ProbeSize(4, 4, 0.5, 0.4, 0.95, loss="dft")
    stale = [StaleDirection(2, 0.93, 0.98)]
    report = make_report(
        0.996, 0.95, None, recipe_epsilon=0.1, probe_sizes=sizes, other_probe_loss=dft_size, stale_directions=stale
    )
    rows = [line.split() for line in describe(report).splitlines()]
    assert ["*finite_difference", "0.1", "-", "-", "0.1", "95.00%", "0.20%", "0.3", "-"] in rows
    start = rows.index(["|B'|", "draws", "Spearman", "lowest", "weight", "overlap"])
    assert rows[start + 1 : start + 4] == [
        ["1", "4", "0.300", "0.100", "90.00%"],
        ["*4", "4", "0.700", "0.600", "97.00%"],
        ["4,", "dft", "loss", "4", "0.500", "0.400", "95.00%"],
    ]
    assert ["2", "0.930", "98.00%"] in rows
    report = replace(report, low_ranks=[LowRankDirection(16, 0.812, 0.9991, None, 0.97)])
    assert ["16", "81.2%", "0.9991", "-", "97.00%"] in [line.split() for line in describe(report).splitlines()]
    alone = describe(make_report(0.996))
    assert "Probe size" not in alone and "Stale" not in alone and alone.endswith("jvp: Spearman 0.996")


# ---- files ---------------------------------------------------------------------------------------------------------


def test_the_json_has_null_for_undefined_numbers(tmp_path: Path) -> None:
    sizes, stale = [ProbeSize(1, 1, None, None, 0.9)], [StaleDirection(1, 0.9, 0.9)]
    report = make_report(0.996, 0.9, math.nan, probe_sizes=sizes, stale_directions=stale, loss_error_nats=math.inf)
    write_report(report, tmp_path)
    written = json.loads((tmp_path / "fidelity.json").read_text(), parse_constant=pytest.fail)
    first, second, third = written["estimators"]
    assert first | {"spearman": 0.996, "estimator": "jvp", "epsilon": None, "changed_fraction": None} == first
    assert second | {"estimator": "finite_difference", "epsilon": 1.0, "spearman": 0.9, "relative_error": 0.1} == second
    assert third["spearman"] is None and written["loss_error_nats"] is None
    assert written["probe_sizes"][0]["spearman"] is None and written["recipe"] == RECIPE
    assert written["stale_directions"] == [{"steps": 1, "spearman": 0.9, "weight_overlap": 0.9}]
    assert written["verdict"] == list(judge(report))
    with pytest.raises(UserError, match="holds a fidelity.json already"):
        prepare_output(tmp_path)


def test_an_output_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output: .*file is a file, not a folder"):
        prepare_output(tmp_path / "file")
    prepare_output(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()


# ---- choice of sequences ---------------------------------------------------------------------------------------------


@given(st.integers(3, 300), st.integers(1, 40), st.integers(1, 8), st.integers(0, 80), st.integers(0, 2**70))
def test_measured_and_probe_sequences_are_disjoint(n: int, probe: int, measured: int, large: int, seed: int) -> None:
    options = FidelityOptions(num_sequences=measured, large_probe_size=large)
    choice = choose_sequences(([n], [1]), None, probe, options, seed)
    together = choice.measured + choice.small_probes + choice.large_probe
    assert len(set(together)) == len(together) and set(together) <= set(range(n))
    assert choice.measured and choice.small_probes and bool(choice.large_probe) == (large > 0)
    assert len(choice.measured) <= measured and len(choice.large_probe) <= large
    assert all(1 <= len(choice.draws(size)) <= 4 for size in choice.probe_sizes)
    enough = n >= measured + max(32, probe) + large
    assert enough == (not choice.notes)
    if enough:
        assert choice.probe_sizes == sorted({1, 4, 8, 32, probe})
        assert len(choice.small_probes) >= probe and len(choice.large_probe) == large


def test_trusted_probe_sequences_are_chosen_from_their_own_file() -> None:
    choice = choose_sequences(([2], [1]), 6, 2, FidelityOptions(num_sequences=4), 0)
    assert sorted(choice.measured) == [0, 1] and "2 instead of 4 sequences" in choice.notes[0]
    assert sorted(choice.small_probes + choice.large_probe) == list(range(6)) and choice.probe_sizes == [1, 2]


def test_too_little_data_and_invalid_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"data.train_path: found 2 sequences.*at least 3"):
        choose_sequences(([2], [1]), None, 1, FidelityOptions(), 0)
    with pytest.raises(UserError, match=r"data.probe_path: found 1 sequence.*at least 2: one as probe"):
        choose_sequences(([9], [1]), 1, 1, FidelityOptions(), 0)
    with pytest.raises(UserError, match="--epsilons -1, --epsilons nan, --large-probe -2: expected positive"):
        check_options(FidelityOptions(epsilons=(-1.0, math.nan, 1.0), large_probe_size=-2))
    with pytest.raises(UserError, match="--sequences 0"):
        check_options(FidelityOptions(num_sequences=0))


def test_training_ends_where_the_recipe_does() -> None:
    options = FidelityOptions(after_steps=3)
    assert limit_to_recipe(options, 11) == (options, [])
    shorter, notes = limit_to_recipe(options, 6)
    assert shorter.stale_steps == (1, 2) and "kept for 4, 8" in notes[0]
    with pytest.raises(UserError, match="--after-steps 3: found more than the recipe's 2 steps"):
        limit_to_recipe(options, 2)
