"""The experiment on whole wrong traces: its traces and scores match its description, and its table shows what was not
run."""

from dataclasses import replace

import pytest
import torch

from tests.experiments import selection, whole_traces
from tests.experiments.directions import make_small_qwen3, token_losses
from tests.experiments.results import choose_rate, parse_setting, whole_traces_table
from tests.experiments.settings import Setting
from tests.experiments.task import (
    BASE,
    CLEAN,
    ERRING_AUTHOR,
    NUM_DIGITS,
    PROMPT_LENGTH,
    SOUND,
    WRONG_TRACE,
    TraceStream,
    measure_trace_separation,
)
from tests.experiments.training import Run
from tests.unit.test_learning_task import compute_clean_tokens, iter_rows


@pytest.mark.parametrize("systematic", [True, False])
def test_an_erring_author_gives_the_answer_that_follows(systematic: bool) -> None:
    traces = TraceStream(1, **ERRING_AUTHOR, systematic=systematic, wrong_traces=0.6).take(300)
    shifts = []
    for (prompt, targets, kinds), wrong in zip(iter_rows(traces), traces.wrong().tolist(), strict=True):
        assert set(kinds) == {WRONG_TRACE if wrong else SOUND}
        if not wrong:
            assert targets == compute_clean_tokens(prompt)
            continue
        written = [targets[5 * step + 3] for step in range(NUM_DIGITS)]
        right = [compute_clean_tokens(prompt)[5 * step + 3] for step in range(NUM_DIGITS)]
        assert targets[-NUM_DIGITS - 1 : -1] == written[::-1]
        shifts += [(a - b) % BASE for a, b in zip(written, right, strict=True)]
    assert float(traces.wrong().float().mean()) == pytest.approx(0.6, abs=0.07)
    assert shifts.count(0) / len(shifts) == pytest.approx(0.2, abs=0.05)
    assert set(shifts) == ({0, 1} if systematic else {0, 1, 2, 3})


def test_a_pool_has_its_exact_share_of_wrong_traces_and_the_problems_of_a_clean_one() -> None:
    pool = TraceStream(3, **ERRING_AUTHOR, systematic=True, wrong_traces=0.25, pool_size=8).whole_pool()
    clean = TraceStream(3, **CLEAN, pool_size=8).whole_pool()
    assert pool.wrong().tolist() == [True] * 2 + [False] * 6
    assert torch.equal(pool.input_ids[:, :PROMPT_LENGTH], clean.input_ids[:, :PROMPT_LENGTH])
    assert torch.equal(pool.input_ids[2:], clean.input_ids[2:])


SETTING = Setting(noise="systematic", wrong_traces=0.5, num_traces=32, pool_size=4, direction="adam")


def test_only_kept_traces_are_drawn() -> None:
    run = Run(replace(SETTING, keep="right"), make_small_qwen3(0))
    assert run.main.take(32).wrong().sum() == 16
    selection.keep(run.setting, run.model, run)
    assert not run.main.take(64).wrong().any()
    run = Run(replace(SETTING, keep="loss"), make_small_qwen3(0))
    scores = selection.keep(run.setting, run.model, run)
    kept = {tuple(row) for row in run.main.take(64).input_ids.tolist()}
    best = run.main.whole_pool().input_ids[scores.argsort(descending=True)[:8]]
    assert kept == {tuple(row) for row in best.tolist()}


def test_utilities_of_traces_are_inner_products_of_gradients() -> None:
    model = make_small_qwen3(0).double()
    stream = TraceStream(1, **ERRING_AUTHOR, systematic=True, wrong_traces=0.5, pool_size=4)
    pool = TraceStream(2, **CLEAN, pool_size=3).whole_pool()
    parameters = list(model.parameters())

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])

    pool_gradient = gradient(
        token_losses(model, pool).mean()
    )  # traces of one length: the mean over tokens is that over traces
    traces = stream.whole_pool()
    each = [token_losses(model, traces)[traces.sequence_index == row].mean() for row in range(4)]
    gradients = torch.stack([gradient(loss) for loss in each])
    clipped = pool_gradient / pool_gradient.norm().clamp_min(1.0)
    for sign, direction in ((False, clipped), (True, pool_gradient.sign())):
        utilities = selection.mean_utilities(model, traces, pool, sign=sign)
        torch.testing.assert_close(utilities.double(), gradients @ direction, rtol=1e-4, atol=1e-5)


def test_separation_of_traces_counts_pairs() -> None:
    wrong = torch.tensor([True, False, True, False])
    assert measure_trace_separation(torch.tensor([1.0, 2.0, 0.0, 1.0]), wrong) == (1 + 1 + 0.5 + 1) / 4


def test_a_line_of_results_gives_its_setting_again() -> None:
    for cell in whole_traces.CELLS:
        for row in whole_traces.make_cell_rows(*cell).values():
            assert parse_setting(row.changed()) == row


def test_rates_are_chosen_by_accuracy_first_and_the_table_shows_what_was_not_run() -> None:
    cell_rows = {name: whole_traces.grid("systematic", 0.6)[name] for name in ("sft", "sft + trusted", "dft")}
    results = []
    for accuracy, loss, rate in ((0.5, 0.1, 3e-4), (0.7, 0.3, 1e-3), (0.7, 0.2, 3e-3)):
        for seed in (*whole_traces.SEEDS, *whole_traces.CHOOSING_SEEDS):
            for name in ("sft", "sft + trusted"):
                setting = replace(cell_rows[name], learning_rate=rate, seed=seed)
                gain = 0.1 if name == "sft + trusted" else 0.0
                result = {"accuracy": accuracy + gain + seed / 100, "held_out_loss": loss, "seconds": 1 + 10 * gain}
                results.append(setting.changed() | result)
    rates = {name: whole_traces.choose_row_rate(name, results) for name in ("sft", "sft + trusted")}
    assert rates == {"sft": 3e-3, "sft + trusted": 3e-3}
    with pytest.raises(ValueError, match="found seeds"):
        choose_rate(cell_rows["sft"], whole_traces.RATES, results[:-2], whole_traces.CHOOSING_SEEDS)
    table = whole_traces_table(cell_rows, rates, results, whole_traces.SEEDS).splitlines()
    assert table[2].startswith("| sft | 0.003 | 5 | 72.0 ± 2.0 |  | **-10.0 ± 0.0** | 0.2000 ± 0.0000 |  |")
    assert table[3].startswith("| sft + trusted | 0.003 | 5 | 82.0 ± 2.0 | **+10.0 ± 0.0** |  |")
    assert table[3].endswith("| 2.0 |")
    assert table[4].startswith("| dft | | not run |") and table[4].count("|") == table[0].count("|")
