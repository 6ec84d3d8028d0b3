"""The legend of step lines that a run prints first, and the remaining time that it prints after the first step."""

import pytest

from vcore_ds.commands.quickstart.session import SHORTER
from vcore_ds.config.load import load_recipe
from vcore_ds.training import console
from vcore_ds.training.console import explain_steps
from vcore_ds.training.loop import LONG_SECONDS, announce_remaining_time


def test_every_number_of_a_step_line_is_in_the_legend(capsys: pytest.CaptureFixture[str]) -> None:
    """Except for numbers with a unit."""
    numbers = dict.fromkeys(("loss", "weighted_loss", "alpha", "tau", "kl", "utility_mean", "utility_std"), 0.5)
    numbers |= dict.fromkeys(("grad_norm", "learning_rate", "supervised_tokens_per_second", "peak_memory_bytes"), 1)
    for changes in ((), ("probe.direction=sgd", "probe.clip=null"), ("methods/sft.yaml",)):
        recipe = load_recipe("quickstart.yaml", changes)
        tau = numbers["tau"] if recipe.method.uses_utilities else None
        console.show_step(1, 2, numbers | {"tau": tau, "utilization": None}, 60.0, log=True)
        parts = capsys.readouterr().out.split("  ")[1:]
        names = [part.split()[0] for part in parts if not part.split()[-1].startswith(("tok", "GiB", "left"))]
        legend = explain_steps(recipe.method, recipe.probe)
        assert len(names) >= 4 and all(f" {name} " in legend for name in names), (names, legend)
        assert ("step 1" in legend) == (recipe.method.uses_utilities and recipe.probe.direction == "adam")


@pytest.mark.parametrize(
    ("seconds", "advice", "begin"),
    [
        (59.0, SHORTER, ""),
        (60.0, SHORTER, "Time: 9 more steps in about 1m00s, until 2"),
        (LONG_SECONDS, SHORTER, "Time: 9 more steps in about 15m00s, until 2"),
        (LONG_SECONDS + 1, SHORTER, "warning: 9 more steps in about 15m01s, until 2"),
        (LONG_SECONDS + 1, "", "Time: 9 more steps in about 15m01s, until 2"),
    ],
)
def test_the_remaining_time_is_announced(
    seconds: float, advice: str, begin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    announce_remaining_time(seconds, 9, advice)
    said = capsys.readouterr().out
    assert said.startswith(begin) and bool(said) == bool(begin)
    is_long = begin.startswith("warning")
    for key in ("schedule.num_steps=", "data.cutoff_length=", "batch.global_size="):
        assert (key in said) == is_long
