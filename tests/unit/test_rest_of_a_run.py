"""The legend of step lines that a run prints first."""

import pytest

from vcore_ds.config.load import load_recipe
from vcore_ds.training import console
from vcore_ds.training.console import explain_steps


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
