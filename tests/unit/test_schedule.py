"""Learning rates of the schedules: by hand, and as transformers' schedulers of the same shape have them."""

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from vcore_ds.config.sections import ScheduleConfig
from vcore_ds.training.schedule import Schedule, derive_schedule

PEAK = 2e-3


def make_schedule(**keys: Any) -> Schedule:
    return derive_schedule(ScheduleConfig(**keys), PEAK, num_sequences=100, per_step=32)


def compute_rates(**keys: Any) -> list[float]:
    schedule = make_schedule(**keys)
    return [schedule.learning_rate(k) / PEAK for k in range(schedule.num_steps)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"num_steps": 5, "warmup_steps": 0, "kind": "cosine"}, [1, 0.9045085, 0.6545085, 0.3454915, 0.0954915]),
        ({"num_steps": 6, "warmup_steps": 2, "kind": "linear"}, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ({"num_steps": 6, "warmup_steps": 2, "kind": "linear", "min_ratio": 0.2}, [0.5, 1, 1, 0.8, 0.6, 0.4]),
        ({"num_steps": 4, "warmup_ratio": 0.5, "kind": "constant"}, [0.5, 1, 1, 1]),
        ({"num_steps": 8, "warmup_steps": 1, "kind": "wsd", "decay_ratio": 0.5}, [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        # A decay that would begin in the warm-up begins after it.
        ({"num_steps": 4, "warmup_steps": 2, "kind": "wsd", "decay_ratio": 1.0}, [0.5, 1, 1, 0.5]),
        ({"num_steps": 3, "warmup_steps": 0, "kind": "wsd", "decay_ratio": 0.01}, [1, 1, 1]),
        # warmup_steps comes before warmup_ratio.
        ({"num_steps": 4, "warmup_ratio": 1.0, "warmup_steps": 0, "kind": "constant"}, [1, 1, 1, 1]),
    ],
)
def test_learning_rates_by_hand(keys: dict[str, Any], expected: list[float]) -> None:
    assert compute_rates(**keys) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"num_epochs": 1}, (4, 0)),  # 100 sequences, 32 a step: the last step goes on into the next epoch
        ({"num_epochs": 2}, (7, 0)),
        ({"num_epochs": 0.32}, (1, 0)),
        ({"num_epochs": 0.33}, (2, 0)),
        ({"num_epochs": 0.001}, (1, 0)),
        ({"num_epochs": 8, "warmup_ratio": 0.05}, (25, 2)),  # 1.25 steps of warm-up
        ({"num_steps": 40, "warmup_ratio": 0.05}, (40, 2)),
    ],
)
def test_steps_and_warmup_are_rounded_up(keys: dict[str, Any], expected: tuple[int, int]) -> None:
    schedule = make_schedule(**{"warmup_ratio": 0.0, **keys})
    assert (schedule.num_steps, schedule.num_warmup_steps) == expected


@pytest.mark.parametrize(
    ("keys", "name", "options"),
    [
        ({"kind": "cosine"}, "cosine", {}),
        ({"kind": "cosine", "min_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ({"kind": "linear"}, "linear", {}),
        ({"kind": "constant"}, "constant_with_warmup", {}),
        ({"kind": "wsd", "decay_ratio": 0.3}, "warmup_stable_decay", {"num_decay_steps": 12, "decay_type": "linear"}),
        (
            {"kind": "wsd", "decay_ratio": 0.3, "min_ratio": 0.1},
            "warmup_stable_decay",
            {"num_decay_steps": 12, "decay_type": "linear", "min_lr_ratio": 0.1},
        ),
    ],
)
def test_learning_rates_are_those_of_transformers(keys: dict[str, Any], name: str, options: dict[str, Any]) -> None:
    """Theirs begin with a step of rate 0 or `min_lr_ratio`; from the peak on the two are the same."""
    num_steps, num_warmup = 40, 5
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = get_scheduler(name, optimizer, num_warmup, num_steps, scheduler_specific_kwargs=options)
    expected = [function(k) for function in theirs.lr_lambdas for k in range(num_steps)]
    ours = compute_rates(num_steps=num_steps, warmup_steps=num_warmup, **keys)
    assert ours[num_warmup:] == pytest.approx(expected[num_warmup:], rel=1e-12)
    if "min_lr_ratio" not in options:
        assert ours[:num_warmup] == pytest.approx(expected[1 : num_warmup + 1], rel=1e-12)


def test_common_steps_of_two_schedules_are_counted() -> None:
    def count_shared(first: dict[str, Any], second: dict[str, Any]) -> int:
        return make_schedule(warmup_steps=2, **first).count_common_steps(make_schedule(warmup_steps=2, **second))

    constant, wsd = {"kind": "constant", "num_steps": 20}, {"kind": "wsd", "num_steps": 10, "decay_ratio": 0.4}
    assert (
        count_shared(constant, wsd) == count_shared(wsd, constant) == 7
    )  # the first step of a decay still has the peak
    assert count_shared(wsd, {**wsd, "num_steps": 20}) == 7  # 12 stable steps
    assert count_shared({"num_steps": 10}, {"num_steps": 20}) == 3
    assert count_shared(constant, {**constant, "num_steps": 9}) == 9
    longer = make_schedule(kind="constant", num_steps=20)  # a tenth of the steps is another warm-up
    assert longer.count_common_steps(make_schedule(kind="constant", num_steps=40)) == 0
