"""The parts of a fidelity measurement: the agreement's numbers, the sentences, the files, the choice of sequences."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image
from scipy.stats import spearmanr

from vcore_ds.commands.fidelity.choice import (
    FidelityOptions,
    check_options,
    choose_sequences,
    num_draws,
    within_the_recipe,
)
from vcore_ds.commands.fidelity.output import prepare_output
from vcore_ds.commands.fidelity.report import (
    Agreement,
    Estimate,
    FidelityReport,
    ProbeSize,
    StaleDirection,
    agreement,
    as_json,
    mean,
    rank_correlation,
    write_report,
)
from vcore_ds.commands.fidelity.text import describe, recommendations
from vcore_ds.errors import UserError

# ---- agreement -----------------------------------------------------------------------------------------------------

few_values = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=40)


@given(few_values)
def test_rank_correlation_is_scipys_also_with_ties(pairs: list[tuple[int, int]]) -> None:
    left, right = (torch.tensor(values, dtype=torch.float32) for values in zip(*pairs, strict=True))
    found = rank_correlation(left, right)
    if len(set(left.tolist())) == 1 or len(set(right.tolist())) == 1:
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(left, right).statistic, abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rank_correlation_of_what_is_not_finite_is_not_defined(bad: float) -> None:
    assert rank_correlation(torch.tensor([1.0, bad, 2.0]), torch.tensor([1.0, 2.0, 3.0])) is None


def test_agreement_by_hand() -> None:
    index = torch.tensor([0, 0, 0, 1, 1])
    reference = torch.tensor([1.0, 2.0, 2.0, 4.0, 0.0], dtype=torch.float64)
    utilities = torch.tensor([1.0, 2.0, 2.0, 0.0, 4.0])  # the second sequence the wrong way round
    weights = torch.tensor([0.5, 0.25, 0.25, 0.1, 0.9])
    reference_weights = torch.tensor([0.25, 0.5, 0.25, 0.9, 0.1])
    found = agreement(utilities, reference, weights, reference_weights, index)
    assert found.relative_error == pytest.approx(math.sqrt(32 / 25))
    assert found.weight_overlap == pytest.approx((0.75 + 0.2) / 2)  # 1 - half of the absolute differences
    assert found.spearman_within_sequences == pytest.approx(0.0)  # +1 and -1
    assert found.spearman == pytest.approx(spearmanr(utilities, reference).statistic)


def test_a_sequence_of_constant_utilities_does_not_count() -> None:
    index, reference = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 2.0, 5.0, 6.0])
    uniform = torch.full((4,), 0.5)
    found = agreement(torch.tensor([3.0, 3.0, 8.0, 9.0]), reference, uniform, uniform, index)
    assert found.spearman_within_sequences == pytest.approx(1.0) and found.weight_overlap == pytest.approx(1.0)
    nothing = agreement(torch.zeros(4), torch.zeros(4), uniform, uniform, index)
    assert nothing.spearman is None and nothing.spearman_within_sequences is None and nothing.relative_error is None
    assert mean([]) is None


# ---- sentences: the rows of a measured table ------------------------------------------------------------------------

RECIPE = {"model": {"path": "some/model"}, "lora": {"rank": 8}}
EPSILONS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


def report_of(jvp: float | None, *differences: float | None, own: float | None = None, **changes) -> FidelityReport:
    """Spearman's by epsilon from 1 downwards; `own`: the recipe's epsilon, None for jvp."""

    def estimate(epsilon: float | None, spearman: float | None) -> Estimate:
        found = Agreement(spearman, spearman, 0.1, 0.95)
        measured = {} if epsilon is None else {"changed_fraction": 0.002, "signal_to_noise": 0.3}
        return Estimate(
            "jvp" if epsilon is None else "finite_difference", epsilon, found, **measured, of_recipe=epsilon == own
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


def test_full_parameters_in_bf16() -> None:
    text = "\n".join(recommendations(report_of(0.996, 0.450, 0.373, 0.946, 0.553, 0.109, 0.199, own=1e-4)))
    assert "Use utility.estimator=jvp: Spearman 0.996 with the fp32 reference" in text
    assert "right at one of the epsilons tried only, 0.01, with Spearman 0.946" in text
    assert "epsilon 1 is too long a step" in text and "epsilon 0.1 is too long a step" in text
    assert (
        "epsilon 0.0001 is rounding: Spearman 0.109, 0.2% of the parameters changed, and the loss change is 0.3 times"
    ) in text
    assert "epsilon 0.001 is" not in text  # doubtful, but not mostly noise
    assert "The recipe's own epsilon, 0.0001, is not reliable" in text


def test_adapters_in_bf16_where_one_epsilon_changes_nothing() -> None:
    text = "\n".join(recommendations(report_of(0.996, 0.850, 0.666, 0.128, -0.004, 0.123, None)))
    assert (
        "right at none of the epsilons tried (Spearman at least 0.9); 1 is best with 0.850, and a longer step may be"
        in text
    )
    assert "epsilon 1e-05 gives every token the same utility: 0.2% of the parameters changed" in text
    assert "too long" not in text and "own epsilon" not in text


def test_full_parameters_in_fp32() -> None:
    report = report_of(
        1.0, 0.2, 0.381, 0.960, 0.999, 1.0, 0.999, own=1e-4, precision="fp32", reference_precision="fp64"
    )
    text = "\n".join(recommendations(report))
    assert "needs an epsilon between 1e-05 and 0.01 here" in text and "0.0001 is best with 1.000" in text
    assert "rounding" not in text and "own epsilon" not in text


def test_where_the_precision_itself_is_the_limit() -> None:
    (about_jvp, *_) = recommendations(report_of(0.97, 0.1))
    assert "jvp reaches Spearman 0.970" in about_jvp and "model.precision=fp32 does" in about_jvp
    assert recommendations(report_of(None, None, utility_std=0.0)) == [
        "The utilities of the reference are all the same: the direction is zero, and there is nothing to rank."
    ]


def test_probe_sizes_and_staleness() -> None:
    sizes = [
        ProbeSize(1, 4, 0.3, 0.1, 0.9),
        ProbeSize(8, 4, 0.85, 0.8, 0.97, of_recipe=True),
        ProbeSize(32, 1, 0.95, 0.95, 0.99),
    ]
    stale = [StaleDirection(1, 0.99, 0.99), StaleDirection(2, 0.93, 0.98), StaleDirection(4, 0.7, 0.95)]
    report = report_of(0.996, 0.95, probe_sizes=sizes, stale_directions=stale)
    text = "\n".join(recommendations(report))
    assert "|B'| 32 is the smallest that agrees with a probe of 64 to 0.950" in text
    assert "The recipe's |B'| 8 agrees with it to 0.850" in text
    assert "may be kept for 2 steps here (probe.every=2): it still agrees with a fresh one to 0.930" in text
    stale_at_once = replace(report, stale_directions=stale[2:], probe_sizes=sizes[:2])
    text = "\n".join(recommendations(stale_at_once))
    assert "No probe size tried agrees with a probe of 64 to 0.9; |B'| 8 reaches 0.850" in text
    assert "should not be kept (probe.every=1): after 4 steps it agrees with a fresh one to 0.700 only" in text


def test_the_table_marks_what_the_recipe_uses_and_has_a_dash_for_nothing() -> None:
    report = report_of(0.996, 0.95, None, own=0.1)
    lines = describe(report, ["a sentence"]).splitlines()
    marked = [line.split() for line in lines if line.startswith("*finite_difference")]
    assert marked == [["*finite_difference", "0.1", "-", "-", "0.1", "95%", "0.2%", "0.3", "-"]]
    assert "- a sentence" in lines


def test_the_other_loss_of_the_probe_has_a_row_below_the_sizes() -> None:
    sizes = [ProbeSize(1, 4, 0.3, 0.1, 0.9), ProbeSize(4, 4, 0.7, 0.6, 0.97, of_recipe=True)]
    other = ProbeSize(4, 4, 0.5, 0.4, 0.95, loss="dft")
    lines = describe(report_of(0.996, 0.95, probe_sizes=sizes, other_probe_loss=other), []).splitlines()
    start = lines.index(next(line for line in lines if line.startswith(" |B'|"))) + 1
    assert [line.split()[0] for line in lines[start : start + 2]] == ["1", "*4"]
    assert lines[start + 2].split() == ["4,", "dft", "loss", "4", "0.500", "0.400", "95%"]


# ---- files ---------------------------------------------------------------------------------------------------------


def test_the_files(tmp_path: Path) -> None:
    report = report_of(
        0.996,
        0.9,
        None,
        math.nan,
        probe_sizes=[ProbeSize(1, 1, None, None, 0.9), ProbeSize(4, 1, 0.8, 0.8, 0.9)],
        stale_directions=[StaleDirection(1, 0.9, 0.9)],
        loss_error_nats=math.inf,
    )
    write_report(report, ["a sentence"], tmp_path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads((tmp_path / "fidelity.json").read_text(), parse_constant=refuse)
    first, second, _, fourth = found["estimators"]
    assert first | {"spearman": 0.996, "estimator": "jvp", "epsilon": None, "changed_fraction": None} == first
    assert second | {"estimator": "finite_difference", "epsilon": 1.0, "spearman": 0.9, "relative_error": 0.1} == second
    assert fourth["spearman"] is None and found["loss_error_nats"] is None
    assert [size["batch_size"] for size in found["probe_sizes"]] == [1, 4]
    assert found["stale_directions"] == [{"steps": 1, "spearman": 0.9, "weight_overlap": 0.9}]
    assert found["recommendations"] == ["a sentence"] and found["recipe"] == RECIPE

    pixels = image.imread(tmp_path / "fidelity.png")
    assert pixels.shape[1] > pixels.shape[0] > 300 and pixels.std() > 0.02
    with pytest.raises(UserError, match="holds a fidelity.json already"):
        prepare_output(tmp_path)


def test_only_the_estimators(tmp_path: Path) -> None:
    report = report_of(0.996, 0.9)
    assert as_json(report, [])["probe_sizes"] == []
    write_report(report, [], tmp_path)
    pixels = image.imread(tmp_path / "fidelity.png")
    assert pixels.shape[0] < pixels.shape[1] * 1.2  # one panel


def test_an_output_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output: .*file is a file, not a folder"):
        prepare_output(tmp_path / "file")
    prepare_output(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()


# ---- which sequences -----------------------------------------------------------------------------------------------


@given(st.integers(3, 300), st.integers(1, 40), st.integers(1, 8), st.integers(0, 80), st.integers(0, 2**70))
def test_measured_and_probe_sequences_share_none(n: int, probe: int, measured: int, large: int, seed: int) -> None:
    options = FidelityOptions(num_sequences=measured, large_probe_size=large)
    choice = choose_sequences(n, None, probe, options, seed)
    together = choice.measured + choice.small_probes + choice.large_probe
    assert len(set(together)) == len(together) and set(together) <= set(range(n))
    assert choice.measured and choice.small_probes and bool(choice.large_probe) == (large > 0)
    assert len(choice.measured) <= measured and len(choice.large_probe) <= large
    assert all(1 <= num_draws(choice, size) <= 4 for size in choice.probe_sizes)
    enough = n >= measured + max(32, probe) + large
    assert enough == (not choice.notes)
    if enough:
        assert choice.probe_sizes == sorted({1, 4, 8, 32, probe})
        assert len(choice.small_probes) >= probe and len(choice.large_probe) == large


def test_trusted_probe_sequences() -> None:
    choice = choose_sequences(2, 6, 2, FidelityOptions(num_sequences=4), 0)
    assert sorted(choice.measured) == [0, 1] and "2 instead of 4 sequences" in choice.notes[0]
    assert sorted(choice.small_probes + choice.large_probe) == list(range(6)) and choice.probe_sizes == [1, 2]


def test_too_little_data_and_numbers_that_mean_nothing() -> None:
    with pytest.raises(UserError, match=r"data.train_path: found 2 sequence\(s\).*at least 3"):
        choose_sequences(2, None, 1, FidelityOptions(), 0)
    with pytest.raises(UserError, match=r"data.probe_path: found 1 sequence\(s\).*at least 2: one as probe"):
        choose_sequences(9, 1, 1, FidelityOptions(), 0)
    with pytest.raises(UserError, match="--epsilons -1, --epsilons nan, --large-probe -2: expected positive"):
        check_options(FidelityOptions(epsilons=(-1.0, math.nan, 1.0), large_probe_size=-2))
    with pytest.raises(UserError, match="--sequences 0"):
        check_options(FidelityOptions(num_sequences=0))


def test_training_ends_where_the_recipe_does() -> None:
    options = FidelityOptions(after_steps=3)
    assert within_the_recipe(options, 11) == (options, [])
    shorter, notes = within_the_recipe(options, 6)
    assert shorter.stale_steps == (1, 2) and "kept for 4, 8" in notes[0]
    with pytest.raises(UserError, match="--after-steps 3: found more than the recipe's 2 steps"):
        within_the_recipe(options, 2)
