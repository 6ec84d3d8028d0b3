"""The task of tests/experiments: its traces are what its description says, and its measures count right."""

import pytest
import torch

from tests.experiments import task
from tests.experiments.task import BASE, IRRELEVANT_PART, NUM_DIGITS, PROMPT_LENGTH, SOUND, WRONG_STEP, TraceStream


def clean_tokens(prompt):
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
    return tokens + [task.ANSWER, *answer, task.END]


def rows(traces):
    """Per sequence: prompt, supervised tokens, their kinds, whether they are of the answer."""
    for row in range(len(traces)):
        here = traces.sequence_index == row
        targets = traces.input_ids[row, 1:][traces.supervised[row]].tolist()
        prompt = traces.input_ids[row, :PROMPT_LENGTH].tolist()
        yield prompt, targets, traces.planted[here].tolist(), traces.in_answer[here].tolist()


def test_clean_traces_are_right():
    for prompt, targets, kinds, in_answer in rows(TraceStream(0, wrong=0, irrelevant=0).take(50)):
        assert targets == clean_tokens(prompt)
        assert set(kinds) == {SOUND}
        assert [t for t, inside in zip(targets, in_answer, strict=True) if inside] == targets[-NUM_DIGITS - 2 : -1]


def test_planted_positions_are_exactly_what_differs_from_the_clean_trace():
    num_wrong = num_irrelevant = 0
    for prompt, targets, kinds, _ in rows(TraceStream(1).take(400)):
        kept = [(token, kind) for token, kind in zip(targets, kinds, strict=True) if kind != IRRELEVANT_PART]
        for (token, kind), right in zip(kept, clean_tokens(prompt), strict=True):
            assert (token != right) == (kind == WRONG_STEP)
        num_wrong += kinds.count(WRONG_STEP)
        num_irrelevant += kinds.count(IRRELEVANT_PART) / 6
    assert num_wrong / (400 * NUM_DIGITS) == pytest.approx(0.2, abs=0.03)
    assert num_irrelevant / (400 * NUM_DIGITS) == pytest.approx(0.3, abs=0.03)


def test_stream_is_a_function_of_its_seed_and_a_pool_repeats():
    assert torch.equal(TraceStream(7).take(8).input_ids, TraceStream(7).take(8).input_ids)
    assert not torch.equal(TraceStream(7).take(8).input_ids[:, :9], TraceStream(8).take(8).input_ids[:, :9])
    pool = TraceStream(3, wrong=0, irrelevant=0, pool_size=5).take(64)
    assert len({tuple(row) for row in pool.input_ids.tolist()}) == 5


def test_separation_and_mass_of_known_weights():
    traces = TraceStream(2).take(20)
    is_sound = (traces.planted == SOUND).float()
    assert task.separation(is_sound, traces) == 1.0
    assert task.separation(1 - is_sound, traces) == 0.0
    assert task.separation(torch.ones(len(is_sound)), traces) == 0.5
    assert task.planted_mass(is_sound, traces) == 0.0
    # Only wrong steps are given less: perfect for them, chance for irrelevant parts.
    without_wrong = (traces.planted != WRONG_STEP).float()
    assert task.separation(without_wrong, traces, WRONG_STEP) == 1.0
    assert task.separation(without_wrong, traces, IRRELEVANT_PART) == 0.5


def test_separation_against_counted_pairs():
    traces = TraceStream(4).take(6)
    weights = torch.randint(0, 4, (len(traces.planted),), generator=torch.Generator().manual_seed(0)).float()
    areas = []
    for row in range(6):
        here = [i for i, index in enumerate(traces.sequence_index.tolist()) if index == row]
        pairs = [(i, j) for i in here for j in here if traces.planted[i] == SOUND and traces.planted[j] > SOUND]
        if pairs:
            above = sum(float(weights[i] > weights[j]) for i, j in pairs)
            level = sum(float(weights[i] == weights[j]) for i, j in pairs)
            areas.append((above + 0.5 * level) / len(pairs))
    assert task.separation(weights, traces) == pytest.approx(sum(areas) / len(areas))


def test_answers_are_compared_up_to_the_first_end():
    traces = TraceStream(5, wrong=0, irrelevant=0).take(4)
    generated = torch.cat([traces.input_ids[:, PROMPT_LENGTH:], torch.zeros(4, 3, dtype=torch.long)], dim=1)
    generated[1, 0] = (generated[1, 0] + 1) % BASE  # another step, the same answer
    last_digit = traces.input_ids.shape[1] - PROMPT_LENGTH - 2
    generated[2, last_digit] = (generated[2, last_digit] + 1) % BASE
    generated[3] = task.ANSWER  # never ends
    assert task.answers_match(generated, traces).tolist() == [True, True, False, False]
