"""The experiments on a small task: its traces are what its description says, and a run uses trusted traces and
directions as the product does."""

from dataclasses import replace

import pytest
import torch

from tests.experiments import task
from tests.experiments.directions import make_small_qwen3
from tests.experiments.settings import BATCH_SIZE, Setting
from tests.experiments.task import (
    BASE,
    CLEAN,
    IRRELEVANT_PART,
    NUM_DIGITS,
    PROMPT_LENGTH,
    RANDOM_NOISE,
    SOUND,
    SYSTEMATIC_NOISE,
    WRONG_STEP,
    TraceStream,
)
from tests.experiments.training import Run


def compute_clean_tokens(prompt):
    """The clean trace of a prompt, by ordinary arithmetic on whole numbers."""

    def number(digits):
        return sum(digit * BASE**place for place, digit in enumerate(reversed(digits)))

    a, b = prompt[:NUM_DIGITS], prompt[NUM_DIGITS + 1 : -1]
    tokens = []
    for place in range(NUM_DIGITS):
        low, next_low = BASE**place, BASE ** (place + 1)
        carry = (number(a) % low + number(b) % low) // low
        digit = (number(a) + number(b)) % next_low // low
        tokens += [number(a) % next_low // low, number(b) % next_low // low, carry, digit, task.END_OF_STEP]
    total = number(a) + number(b)
    answer = [total // BASE**place % BASE for place in reversed(range(NUM_DIGITS + 1))]
    return [*tokens, task.ANSWER, *answer, task.END]


def iter_rows(traces):
    """Per sequence: prompt, supervised tokens, their kinds."""
    for row in range(len(traces)):
        here = traces.sequence_index == row
        targets = traces.input_ids[row, 1:][traces.supervised[row]].tolist()
        prompt = traces.input_ids[row, :PROMPT_LENGTH].tolist()
        yield prompt, targets, traces.planted[here].tolist()


def test_clean_traces_are_right():
    for prompt, targets, kinds in iter_rows(TraceStream(0, wrong=0, irrelevant=0).take(50)):
        assert targets == compute_clean_tokens(prompt)
        assert set(kinds) == {SOUND}


@pytest.mark.parametrize("noise", [RANDOM_NOISE, SYSTEMATIC_NOISE], ids=["random", "systematic"])
def test_planted_positions_are_exactly_what_differs_from_the_clean_trace(noise):
    num_wrong = num_irrelevant = 0
    for prompt, targets, kinds in iter_rows(TraceStream(1, **noise).take(400)):
        kept = [(token, kind) for token, kind in zip(targets, kinds, strict=True) if kind != IRRELEVANT_PART]
        for (token, kind), right in zip(kept, compute_clean_tokens(prompt), strict=True):
            assert (token != right) == (kind == WRONG_STEP)
        num_wrong += kinds.count(WRONG_STEP)
        num_irrelevant += kinds.count(IRRELEVANT_PART) / 6
    assert num_wrong / (400 * NUM_DIGITS) == pytest.approx(noise["wrong"], abs=0.03)
    assert num_irrelevant / (400 * NUM_DIGITS) == pytest.approx(noise["irrelevant"], abs=0.03)


def test_systematic_noise_is_always_the_same():
    wrong, irrelevant = [], []
    for prompt, targets, kinds in iter_rows(TraceStream(1, **SYSTEMATIC_NOISE).take(100)):
        kept = [(token, kind) for token, kind in zip(targets, kinds, strict=True) if kind != IRRELEVANT_PART]
        pairs = zip(kept, compute_clean_tokens(prompt), strict=True)
        wrong += [(token - right) % BASE for (token, kind), right in pairs if kind == WRONG_STEP]
        irrelevant += [token for token, kind in zip(targets, kinds, strict=True) if kind == IRRELEVANT_PART]
    assert set(wrong) == {1}
    part = [task.IRRELEVANT, 0, 1, 2, 3, task.END_OF_STEP]
    assert len(irrelevant) > 600 and irrelevant == part * (len(irrelevant) // 6)


def test_stream_is_a_function_of_its_seed_and_a_pool_repeats():
    assert torch.equal(TraceStream(7).take(8).input_ids, TraceStream(7).take(8).input_ids)
    assert not torch.equal(TraceStream(7).take(8).input_ids[:, :9], TraceStream(8).take(8).input_ids[:, :9])
    pool = TraceStream(3, wrong=0, irrelevant=0, pool_size=5).take(64)
    assert len({tuple(row) for row in pool.input_ids.tolist()}) == 5


def test_a_batch_as_large_as_the_pool_is_the_pool_and_draws_leave_it_alone():
    batches = [TraceStream(3, **CLEAN, pool_size=12, draws=draws).take(12).input_ids.tolist() for draws in (1, 2)]
    assert batches[0] != batches[1] and sorted(batches[0]) == sorted(batches[1])
    assert len({tuple(row) for row in batches[0]}) == 12


def test_answers_are_compared_up_to_the_first_end():
    traces = TraceStream(5, wrong=0, irrelevant=0).take(4)
    generated = torch.cat([traces.input_ids[:, PROMPT_LENGTH:], torch.zeros(4, 3, dtype=torch.long)], dim=1)
    generated[1, 0] = (generated[1, 0] + 1) % BASE  # another step, the same answer
    last_digit = traces.input_ids.shape[1] - PROMPT_LENGTH - 2
    generated[2, last_digit] = (generated[2, last_digit] + 1) % BASE
    generated[3] = task.ANSWER  # never ends
    assert task.answers_match(generated, traces).tolist() == [True, True, False, False]


VCORE = Setting(method="vcore", kl_budget=0.5, direction="adam", probe_data="pool", pool_size=8, learning_rate=1e-3)


def test_a_trusted_share_comes_on_top_of_the_training_sequences():
    setting = replace(VCORE, trusted_share=0.2)
    traces, weights = Run(setting, make_small_qwen3(0)).step(0)
    assert len(traces) == BATCH_SIZE + 4 and 4 / len(traces) == setting.trusted_share
    training = Run(replace(setting, trusted_share=0.0), make_small_qwen3(0)).main.take(BATCH_SIZE)
    longest = training.input_ids.shape[1]
    assert torch.equal(traces.input_ids[:BATCH_SIZE, :longest], training.input_ids)
    pool = {tuple(row) for row in Run(setting, make_small_qwen3(0)).make_pool(0).take(8).input_ids.tolist()}
    length = PROMPT_LENGTH + task.CLEAN_LENGTH
    assert {tuple(row) for row in traces.input_ids[BATCH_SIZE:, :length].tolist()} <= pool
    assert float(weights.sum()) == pytest.approx(len(traces), rel=1e-5)


def test_a_direction_is_shared_by_probe_every_steps_and_averaged_by_probe_decay():
    run = Run(replace(VCORE, probe_every=2, probe_decay=0.5, direction="sgd"), make_small_qwen3(0))
    vectors = []
    for k in range(3):
        run.step(k)
        vectors.append({name: vector.clone() for name, vector in run.direction.vector.items()})
    assert run.direction.num_taken == 2
    for name in run.direction.vector:
        assert torch.equal(vectors[0][name], vectors[1][name])
    # Too small to be clipped. Weights of the three directions: 1/4, 1/2 and 1, over their sum.
    run.direction.take([torch.full_like(p, 1e-3) for p in run.direction.parameters.values()])
    for name in run.direction.vector:
        expected = (vectors[2][name] * 0.75 + 1e-3) / 1.75
        torch.testing.assert_close(run.direction.vector[name], expected, rtol=1e-4, atol=1e-7)


def test_the_previous_step_gives_the_direction_from_the_second_step_on():
    run = Run(replace(VCORE, probe_source="previous_step"), make_small_qwen3(0))
    traces, weights = run.step(0)
    num_tokens = torch.bincount(traces.sequence_index)[traces.sequence_index]
    torch.testing.assert_close(weights, 1 / num_tokens)
    _, weights = run.step(1)
    assert float(weights.max() / weights.min()) > 2


def test_the_scope_of_a_batch_moves_weight_between_sequences_within_its_budget():
    _, alone = Run(VCORE, make_small_qwen3(0)).step(0)
    traces, weights = Run(replace(VCORE, batch_kl_budget=0.1), make_small_qwen3(0)).step(0)
    shares = task.segment_sum(weights, traces.sequence_index, BATCH_SIZE) / BATCH_SIZE
    assert float(shares.sum()) == pytest.approx(1.0, rel=1e-5)
    assert float((shares * (shares * BATCH_SIZE).log()).sum()) == pytest.approx(0.1, abs=1e-4)
    within = weights / (shares * BATCH_SIZE)[traces.sequence_index]
    torch.testing.assert_close(within, alone, rtol=1e-3, atol=1e-6)
