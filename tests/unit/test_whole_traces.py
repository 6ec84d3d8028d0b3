"""The experiment on whole wrong traces: its traces are what its description says, a run uses trusted traces and
directions as the product does, and scores match their definition."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.experiments import task, whole_traces
from tests.experiments.directions import make_small_qwen3, token_losses
from tests.experiments.settings import BATCH_SIZE, Setting, choose_rate, parse_setting, whole_traces_table
from tests.experiments.task import BASE, NUM_DIGITS, PROMPT_LENGTH, Traces, TraceStream, measure_trace_separation
from tests.experiments.training import Run, keep, mean_utilities


def compute_clean_tokens(prompt: list[int]) -> list[int]:
    """The clean trace of a prompt, by ordinary arithmetic on whole numbers."""

    def number(digits: list[int]) -> int:
        return sum(digit * BASE**place for place, digit in enumerate(reversed(digits)))

    a, b = number(prompt[:NUM_DIGITS]), number(prompt[NUM_DIGITS + 1 : -1])
    tokens = []
    for place in range(NUM_DIGITS):
        low, next_low = BASE**place, BASE ** (place + 1)
        carry, digit = (a % low + b % low) // low, (a + b) % next_low // low
        tokens += [a % next_low // low, b % next_low // low, carry, digit, task.END_OF_STEP]
    answer = [(a + b) // BASE**place % BASE for place in reversed(range(NUM_DIGITS + 1))]
    return [*tokens, task.ANSWER, *answer, task.END]


def split_rows(traces: Traces) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and trace of each sequence."""
    return ((row[:PROMPT_LENGTH], row[PROMPT_LENGTH:]) for row in traces.input_ids.tolist())


@pytest.mark.parametrize("systematic", [True, False])
def test_an_erring_author_gives_the_answer_that_follows(systematic: bool) -> None:
    traces = TraceStream(1, wrong_traces=0.6, systematic=systematic).take(300)
    shifts = []
    for (prompt, targets), wrong in zip(split_rows(traces), traces.wrong.tolist(), strict=True):
        right = compute_clean_tokens(prompt)
        if not wrong:
            assert targets == right
            continue
        written = targets[3 : 5 * NUM_DIGITS : 5]
        assert targets[-NUM_DIGITS - 1 : -1] == written[::-1]
        shifts += [(a - b) % BASE for a, b in zip(written, right[3 : 5 * NUM_DIGITS : 5], strict=True)]
    assert float(traces.wrong.float().mean()) == pytest.approx(0.6, abs=0.07)
    assert shifts.count(0) / len(shifts) == pytest.approx(0.2, abs=0.05)
    assert set(shifts) == ({0, 1} if systematic else {0, 1, 2, 3})


def test_a_stream_is_a_function_of_its_seed_and_a_pool_repeats() -> None:
    first, again, other = (TraceStream(seed).take(8).input_ids for seed in (7, 7, 8))
    assert torch.equal(first, again) and not torch.equal(first, other)
    batches = [TraceStream(3, pool_size=12, draws=draws).take(12).input_ids.tolist() for draws in (1, 2)]
    assert batches[0] != batches[1] and sorted(batches[0]) == sorted(batches[1])
    assert len({tuple(row) for row in TraceStream(3, pool_size=12).take(64).input_ids.tolist()}) == 12
    # A pool has its exact share of wrong traces, and the problems of a clean one.
    pool = TraceStream(3, systematic=True, wrong_traces=0.25, pool_size=8).whole_pool()
    clean = TraceStream(3, pool_size=8).whole_pool()
    assert pool.wrong.tolist() == [True] * 2 + [False] * 6
    assert torch.equal(pool.input_ids[:, :PROMPT_LENGTH], clean.input_ids[:, :PROMPT_LENGTH])
    assert torch.equal(pool.input_ids[2:], clean.input_ids[2:])


def test_answers_are_compared_up_to_the_first_end() -> None:
    traces = TraceStream(5).take(4)
    generated = torch.cat([traces.input_ids[:, PROMPT_LENGTH:], torch.zeros(4, 3, dtype=torch.long)], dim=1)
    generated[1, 0] = (generated[1, 0] + 1) % BASE  # another step, the same answer
    last_digit = task.TRACE_LENGTH - 2
    generated[2, last_digit] = (generated[2, last_digit] + 1) % BASE
    generated[3] = task.ANSWER  # never ends
    assert task.answers_match(generated, traces).tolist() == [True, True, False, False]


VCORE = Setting(method="vcore", kl_budget=0.5, direction="adam", probe_data="pool", pool_size=8, learning_rate=1e-3)
SETTING = Setting(noise="systematic", wrong_traces=0.5, num_traces=32, pool_size=4, direction="adam")


def test_a_trusted_share_comes_on_top_of_the_training_sequences() -> None:
    setting = replace(VCORE, trusted_share=0.2)
    traces, weights = Run(setting, make_small_qwen3(0)).step(0)
    assert len(traces) == BATCH_SIZE + 4 and 4 / len(traces) == setting.trusted_share
    run = Run(setting, make_small_qwen3(0))
    assert torch.equal(traces.input_ids[:BATCH_SIZE], run.main.take(BATCH_SIZE).input_ids)
    pool = run.make_pool(0).take(8).input_ids.tolist()
    assert all(row in pool for row in traces.input_ids[BATCH_SIZE:].tolist())
    assert float(weights.sum()) == pytest.approx(len(traces), rel=1e-5)


def test_a_direction_is_shared_by_probe_every_steps_and_averaged_by_probe_decay() -> None:
    run = Run(replace(VCORE, probe_every=2, probe_decay=0.5, direction="sgd"), make_small_qwen3(0))
    vectors = []
    for k in range(3):
        run.step(k)
        vectors.append({name: vector.clone() for name, vector in run.direction.vector.items()})
    assert run.direction.num_taken == 2
    # Too small to be clipped. Weights of the three directions: 1/4, 1/2 and 1, over their sum.
    run.direction.take([torch.full_like(p, 1e-3) for p in run.direction.parameters.values()])
    for name, vector in run.direction.vector.items():
        assert torch.equal(vectors[0][name], vectors[1][name])
        torch.testing.assert_close(vector, (vectors[2][name] * 0.75 + 1e-3) / 1.75, rtol=1e-4, atol=1e-7)


def test_the_previous_step_gives_the_direction_from_the_second_step_on() -> None:
    run = Run(replace(VCORE, probe_source="previous_step"), make_small_qwen3(0))
    _, weights = run.step(0)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / task.TRACE_LENGTH))
    _, weights = run.step(1)
    assert float(weights.max() / weights.min()) > 2


def test_the_scope_of_a_batch_moves_weight_between_sequences_within_its_budget() -> None:
    _, alone = Run(VCORE, make_small_qwen3(0)).step(0)
    traces, weights = Run(replace(VCORE, batch_kl_budget=0.1), make_small_qwen3(0)).step(0)
    shares = traces.mean(weights) * task.TRACE_LENGTH / BATCH_SIZE
    assert float(shares.sum()) == pytest.approx(1.0, rel=1e-5)
    assert float((shares * (shares * BATCH_SIZE).log()).sum()) == pytest.approx(0.1, abs=1e-4)
    within = weights / (shares * BATCH_SIZE)[traces.sequence_index]
    torch.testing.assert_close(within, alone, rtol=1e-3, atol=1e-6)


def test_only_kept_traces_are_drawn() -> None:
    run = Run(replace(SETTING, keep="right"), make_small_qwen3(0))
    assert run.main.take(32).wrong.sum() == 16
    keep(run.setting, run.model, run)
    assert not run.main.take(64).wrong.any()
    run = Run(replace(SETTING, keep="loss"), make_small_qwen3(0))
    scores = keep(run.setting, run.model, run)
    kept = {tuple(row) for row in run.main.take(64).input_ids.tolist()}
    best = run.main.whole_pool().input_ids[scores.argsort(descending=True)[:8]]
    assert kept == {tuple(row) for row in best.tolist()}


def test_utilities_of_traces_are_inner_products_of_gradients() -> None:
    model = make_small_qwen3(0).double()
    pool = TraceStream(2, pool_size=3).whole_pool()
    traces = TraceStream(1, systematic=True, wrong_traces=0.5, pool_size=4).whole_pool()

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    pool_gradient = gradient(token_losses(model, pool).mean())
    gradients = torch.stack([gradient(traces.mean(token_losses(model, traces))[row]) for row in range(4)])
    clipped = pool_gradient / pool_gradient.norm().clamp_min(1.0)
    for sign, direction in ((False, clipped), (True, pool_gradient.sign())):
        utilities = mean_utilities(model, traces, pool, sign=sign)
        torch.testing.assert_close(utilities.double(), gradients @ direction, rtol=1e-4, atol=1e-5)


def test_separation_counts_pairs_and_a_line_of_results_gives_its_setting_again() -> None:
    wrong = torch.tensor([True, False, True, False])
    assert measure_trace_separation(torch.tensor([1.0, 2.0, 0.0, 1.0]), wrong) == (1 + 1 + 0.5 + 1) / 4
    for cell in whole_traces.CELLS:
        for row in whole_traces.make_cell_rows(*cell).values():
            assert parse_setting(row.changed()) == row


def test_rates_are_chosen_by_accuracy_first() -> None:
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
    _, _, sft, trusted = whole_traces_table(cell_rows, rates, results, whole_traces.SEEDS).splitlines()
    assert sft.startswith("| sft | 0.003 | 5 | 72.0 ± 2.0 |  | **-10.0 ± 0.0** | 0.2000 ± 0.0000 |  |")
    assert trusted.startswith("| sft + trusted | 0.003 | 5 | 82.0 ± 2.0 | **+10.0 ± 0.0** |  |")
    assert trusted.endswith("| 2.0 |")
