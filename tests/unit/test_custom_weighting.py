"""`method.name: custom`: where a function is found, its messages, and what of it a resumed run must share."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.recipes import find_problem, smallest_recipe, write_yaml
from tests.helpers.weightings import write_functions_of_page
from vcore_ds.commands.cli import main
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.config.schema import Recipe, differing_keys
from vcore_ds.method.weights import Tokens
from vcore_ds.planning.passes import FORWARD, derive_passes
from vcore_ds.planning.settings import MemorySettings, derive_plan_settings
from vcore_ds.training.run_folder import can_resume
from vcore_ds.training.weighting import check_function, token_weights

FOCAL = ("method.function=my_weights:focal", "method.options={gamma: 2}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe beside the page's functions; the working directory is another one."""
    folder, here = tmp_path / "recipes with spaces", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    write_yaml(folder / "mine.yaml", smallest_recipe() | {"method": {"name": "custom"}})
    (folder / "ds.json").write_text("{}")
    write_functions_of_page(folder)
    return folder


def load(folder: Path, *words: str) -> Recipe:
    return load_recipe(folder / "mine.yaml", words or FOCAL)


def test_the_functions_of_the_page_weight_tokens(folder: Path) -> None:
    losses = torch.tensor([0.5, 0.25, 0.75]).log().neg()
    tokens = Tokens(losses, torch.tensor([0, 0, 1]), 2, utilities=torch.tensor([3.0, -1.0, 0.0]))
    focal, helpful = load(folder).method, load(folder, "method.function=my_weights:helpful").method
    assert token_weights(focal, tokens).weights.tolist() == pytest.approx([0.25 / 2, 0.5625 / 2, 0.0625])
    assert token_weights(helpful, tokens).weights.tolist() == pytest.approx([1 / 2, 0.1 / 2, 0.1])
    assert (focal.uses_utilities, helpful.uses_utilities, focal.alpha) == (False, True, "none")


def test_inputs_are_those_of_the_supervised_tokens(folder: Path) -> None:
    """A function that changes them in place changes nothing else, and its graph is not part of the loss."""
    (folder / "all.py").write_text(
        "import torch\nscale = torch.nn.Parameter(torch.ones(()))\n"
        "def f(losses, probabilities, entropies, utilities, sequence_index, num_sequences, positions):\n"
        "    assert num_sequences == 3 and losses.mul_(2).sum() > 0\n"
        "    factors = 100 * sequence_index + 10 * positions + entropies + utilities / 10\n"
        "    return scale * factors + probabilities.round() / 100\n"
    )
    recipe, losses = load(folder, "method.function=all:f"), torch.tensor([0.1, 3.0, 0.2, 0.1, 2.0])
    tokens = Tokens(losses, torch.tensor([0, 0, 2, 2, 2]), 3, torch.arange(5.0), statistics=torch.arange(5.0))
    expected = torch.tensor([0.01, 11.1, 202.21, 213.31, 224.4]) / torch.tensor([2, 2, 3, 3, 3])
    weights = token_weights(recipe.method, tokens).weights
    assert weights.tolist() == pytest.approx(expected.tolist()) and not weights.requires_grad
    assert losses.tolist() == pytest.approx([0.1, 3.0, 0.2, 0.1, 2.0])
    (folder / "root.py").write_text("def f(losses, probabilities):\n    return losses.sqrt() - 1 + probabilities * 0\n")
    tokens = Tokens(torch.tensor([-1e-7, 4.0]), torch.tensor([0, 0]), 1)  # the loss of a certain token, by rounding
    weights = token_weights(load(folder, "method.function=root:f").method, tokens).weights
    assert weights.isnan().tolist() == [True, False] and weights[1] == 0.5, "no negative factor is trained on"
    memory = MemorySettings(num_ranks=1, main_tokens=8, probe_tokens=8, estimator="jvp", is_fused=True)
    passes = derive_passes(derive_plan_settings(recipe), memory)
    assert passes.probe is not None and passes.utility == FORWARD  # of the entropies


@pytest.mark.parametrize(
    ("source", "words", "key", "mentioned"),
    [
        ("", (), "function", "MODULE:FUNCTION"),
        ("", ("method.function=gone:f",), "function", "gone:f"),
        ("def f(loss): ...", ("method.function=own:f",), "function", '"losses"'),
        ("def f(*all): ...", ("method.function=own:f",), "function", "all"),
        ("def focal(losses): ...", ("method.function=own:fokal",), "function", '"focal"'),
        ("def f(losses, gamma): ...", ("method.function=own:f",), "function", "gamma"),
        ("def f(gamma=1): ...", ("method.function=own:f", "method.options={gama: 2}"), "options", '"gamma"'),
        ("def f(losses): ...", ("method.function=own:f", "method.options={losses: 2}"), "options", "losses"),
        ("def f(losses:", ("method.function=own:f",), "function", "own.py:1"),
        ("def f(losses): return losses\0", ("method.function=own:f",), "function", "own.py:1"),
        ("f = 'é'", ("method.function=own:f",), "function", "own.py:"),
        ("(" * 9999, ("method.function=own:f",), "function", "own.py:1"),
        ("", ('method.function="a\\0b:f"',), "function", "MODULE:FUNCTION"),
        ("", (*FOCAL, "method.alpha=variance"), "alpha", "utilities"),
        ("", (*FOCAL, "method.scope=sequence_and_batch", "method.batch_kl_budget=1.0"), "scope", "sequence"),
    ],
)
def test_a_mistake_is_one_problem_with_its_key(folder: Path, source: str, words, key: str, mentioned: str) -> None:
    (folder / "own.py").write_text(source, encoding="latin-1")
    problem = find_problem(folder / "mine.yaml", *words)
    assert f": method.{key}: found " in problem and mentioned in problem


RETURNED = ["losses.mean()", "losses[:3]", "losses[:, None]", "0.5", "-losses", "losses.log()", "torch.rand(6)"]
RETURNED += ["losses + missing", "exit(0)"]


@pytest.mark.parametrize("returned", RETURNED)
def test_a_function_is_tried_before_a_model_is_loaded(folder: Path, returned: str, capsys) -> None:
    (folder / "bad.py").write_text(f"import torch\n\ndef f(losses):\n    return {returned}\n")
    assert main(["check", str(folder / "mine.yaml"), "method.function=bad:f"]) == 2
    message = capsys.readouterr().err
    assert "method.function: " in message and ("bad.py:4" in message) == ("missing" in returned)


@pytest.mark.parametrize("returned", ["losses[:, None]", "losses.mean()", "0.5"])
def test_factors_of_another_shape_end_the_run(folder: Path, returned: str) -> None:
    """Of a micro-batch as the made-up tokens are not."""
    (folder / "bad.py").write_text(f"def f(losses):\n    return losses if len(losses) == 6 else {returned}\n")
    method = load(folder, "method.function=bad:f").method
    check_function(method)
    with pytest.raises(UserError, match=r"method.function: .*expected a tensor \[2\]"):
        token_weights(method, Tokens(torch.ones(2), torch.zeros(2, dtype=torch.int64), 1))


def test_a_resumed_run_must_have_the_same_function(folder: Path) -> None:
    """Its file may be elsewhere; another source or option is refused, and the run's recipe finds the kept file."""
    run, file = folder / "run", folder / "my_weights.py"
    words = [*FOCAL, f"run.output_dir={run}"]
    first = load(folder, *words)
    run.mkdir()
    (run / "recipe.yaml").write_text(dump_recipe(first))
    shutil.copy(file, run)
    shutil.copy(file, Path.cwd())
    moved = load(folder, *words, f"method.function={Path.cwd()}/my_weights.py:focal")
    assert moved.method.function != first.method.function and can_resume(moved) and can_resume(first)
    assert differing_keys(first, load(folder, *words, "method.options={gamma: 3}")).keys() == {"method.options"}
    file.write_bytes(file.read_bytes().replace(b"** gamma", b"** (gamma + 1)"))
    with pytest.raises(UserError, match=r"method\.function_digest: .* there, .* here"):
        can_resume(load(folder, *words))
    file.unlink()
    kept = load_recipe(run / "recipe.yaml").method
    assert kept == first.method.model_copy(update={"function": f"{run}/my_weights.py:focal"})
