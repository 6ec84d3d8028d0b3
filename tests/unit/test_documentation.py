"""Every command line of the documentation that names a recipe is one that works, and every file it names is there."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from vcore_ds.cli import main, parse
from vcore_ds.commands.quickstart.session import RECIPE as QUICKSTART
from vcore_ds.config import load_recipe, plan_batch

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "launch_scripts" / "recipes"
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
COMMAND = re.compile(
    r"(?:\bvcore-ds|--module vcore_ds\.cli|-m vcore_ds\.cli) (?P<words>(?:train|check|fidelity|reference) .*)"
    r"|launch_scripts/(?P<script>train_32b|quickstart)\.sh(?P<arguments>.*)"
)
DEFAULT_RECIPES = {"train_32b": FOLDER / "qwen3_32b_math_full.yaml", "quickstart": QUICKSTART}


def fenced(document: Path, language: str) -> list[str]:
    """The text of the code blocks in that language ("" for none)."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)


def documented_commands() -> list[tuple[str, str]]:
    """(document, line) of each command line that names a recipe, or a script that has one."""
    found = []
    for document in DOCUMENTS:
        lines = [line for block in fenced(document, "") for line in block.splitlines()]
        found += [
            (document.name, line) for line in lines if (match := COMMAND.search(line)) and "RECIPE" not in match[0]
        ]
    return found


def as_check(line: str) -> list[str]:
    """`vcore-ds check` with the recipe, fragments and overrides of a command line, which has to parse as it is."""
    match = COMMAND.search(line)
    assert match is not None
    if match["words"]:
        parsed = parse(shlex.split(match["words"], comments=True))
        return ["check", parsed.recipe, *parsed.overrides]
    recipe, arguments = str(DEFAULT_RECIPES[match["script"]]), shlex.split(match["arguments"], comments=True)
    if "--recipe" in arguments:
        at = arguments.index("--recipe")
        recipe = arguments[at + 1]
        del arguments[at : at + 2]
    return ["check", recipe, *arguments]


def test_the_documentation_has_commands() -> None:
    documents = [document for document, _ in documented_commands()]
    assert documents.count("recipes.md") >= 35 and documents.count("README.md") >= 3


@pytest.mark.parametrize(("document", "line"), documented_commands())
def test_a_documented_command_passes_check(
    document: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Where no run has been, so that an output folder of this checkout plays no role.
    (tmp_path / "launch_scripts").symlink_to(REPOSITORY / "launch_scripts")
    monkeypatch.chdir(tmp_path)
    assert main(as_check(line)) == 0, f"{document}: {line}\n{capsys.readouterr().err}"
    words = [word for word in as_check(line) if "=" in word]
    printed = yaml.safe_load(capsys.readouterr().out.partition("\nBatch: ")[0])
    for section, key, value in (re.match(r"(\w+)\.(\w+)=(.*)", word).groups() for word in words):  # type: ignore[union-attr]
        shown = printed[section][key]
        assert str(shown) == value or shown == (None if value == "null" else float(value)), line


def test_the_recipe_that_the_documentation_writes_loads(tmp_path: Path) -> None:
    blocks = fenced(REPOSITORY / "docs" / "recipes.md", "yaml")
    assert blocks
    for block in blocks:
        (tmp_path / "mine.yaml").write_text(block)
        recipe = load_recipe(tmp_path / "mine.yaml")
        plan_batch(recipe, 8)
        assert recipe.run.output_dir == "runs/mine" and recipe.data.cutoff_length == 8192


def test_files_that_the_documentation_names_are_there() -> None:
    named = re.compile(r"\b(?:launch_scripts/recipes|presets|methods|parts|paper)/[\w./]+\.yaml")
    found = [(document, name) for document in DOCUMENTS for name in named.findall(document.read_text())]
    assert len(found) > 40
    for document, name in found:
        if not re.search("[A-Z]{4}", name):  # MODEL_TASK and the like
            assert (FOLDER / name.removeprefix("launch_scripts/recipes/")).is_file(), f"{document.name}: {name}"
