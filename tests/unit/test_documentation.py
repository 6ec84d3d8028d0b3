"""Documented commands work, and every file, function and recipe key that the documentation names exists."""

import functools
import re
import shlex
from datetime import date
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import vcore_ds
from launch_scripts.quickstart import RECIPE as QUICKSTART
from tests.unit.test_layers import ARCHITECTURE, LEVELS, PACKAGE
from vcore_ds.commands.cli import main, parse
from vcore_ds.config.load import load_recipe
from vcore_ds.config.schema import SECTIONS
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.known_models import QWEN3_32B
from vcore_ds.planning.settings import derive_plan_settings

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "launch_scripts" / "recipes"
PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS = [*PAGES, *sorted((REPOSITORY / "docs").rglob("*.md"))]
COMMAND = re.compile(
    r"(?:\bvcore-ds|-m(?:odule)? vcore_ds(?:\.commands\.cli)?) (?P<words>(?:train|check|fidelity|reference) .*)"
    r"|launch_scripts/(?P<script>train_32b|quickstart)\.sh(?P<arguments>.*)"
)
DEFAULT_RECIPES = {"train_32b": FOLDER / "qwen3_32b_math_full.yaml", "quickstart": QUICKSTART}


def read_code_blocks(document: Path, language: str) -> list[str]:
    """The text of the code blocks in that language ("" for none)."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    return [text for block_language, text in blocks if block_language == language]


def read_recipes() -> dict[str, str]:
    """The recipes that docs/recipes.md writes, by the file name in their first line."""
    return {
        re.match(r"# ([\w.]+)", text)[1]: text for text in read_code_blocks(REPOSITORY / "docs" / "recipes.md", "yaml")
    }  # type: ignore[index]


def list_commands() -> list[tuple[str, str]]:
    """(document, line) of each command line that names a recipe, or a script that has one."""
    commands = []
    for document in DOCUMENTS:
        lines = [line for block in read_code_blocks(document, "") for line in block.splitlines()]
        commands += [
            (document.name, line) for line in lines if (match := COMMAND.search(line)) and "RECIPE" not in match[0]
        ]
    return commands


def make_check_words(line: str) -> list[str]:
    """`vcore-ds check` with the recipe, fragments and overrides of a command line, which has to parse as it is."""
    match = COMMAND.search(line)
    assert match is not None
    if match["words"]:
        parsed = parse(shlex.split(match["words"], comments=True))
        return ["check", parsed.recipe, *parsed.overrides]
    recipe, arguments = str(DEFAULT_RECIPES[match["script"]]), shlex.split(match["arguments"], comments=True)
    if "--recipe" in arguments:
        position = arguments.index("--recipe")
        recipe = arguments[position + 1]
        del arguments[position : position + 2]
    return ["check", recipe, *(word for word in arguments if word != "--eval")]


def test_commands_of_the_documentation_are_detected() -> None:
    documents = [document for document, _ in list_commands()]
    assert documents.count("recipes.md") >= 40 and documents.count("README.md") >= 3
    lines = {line for page in DOCUMENTS for block in read_code_blocks(page, "") for line in block.splitlines()}
    named = {line for line in lines if re.search(r"\b(train|check|fidelity|reference) \S+\.yaml", line)}
    assert named - {line for _, line in list_commands()} == set()


@pytest.mark.parametrize(("document", "line"), list_commands())
def test_a_documented_command_passes_check(
    document: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In an empty folder, so that a run's folder in this checkout has no influence.
    (tmp_path / "launch_scripts").symlink_to(REPOSITORY / "launch_scripts")
    for name, text in read_recipes().items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main([*make_check_words(line), "--recipe"]) == 0, f"{document}: {line}\n{capsys.readouterr().err}"
    words = [word for word in make_check_words(line) if "=" in word]
    printed = yaml.safe_load(capsys.readouterr().out)
    for name, value in (word.split("=", 1) for word in words):
        shown = printed
        for part in name.split("."):
            shown = shown[part]
        assert str(shown) == value or shown == (None if value == "null" else float(value)), line


def test_the_recipes_that_the_documentation_writes_load_and_begin_with_sft(tmp_path: Path) -> None:
    written = {}
    for name, text in read_recipes().items():
        (tmp_path / name).write_text(text)
        recipe = load_recipe(tmp_path / name)
        plan_batch(derive_plan_settings(recipe), 8, QWEN3_32B)
        written[name] = recipe.run.output_dir, recipe.data.cutoff_length, recipe.method.name
    assert written == {"mine.yaml": ("runs/mine", 8192, "sft"), "small.yaml": ("runs/small", 2048, "sft")}
    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    begin, instead = re.search(r"  - (\S+) +# (\S+) instead makes it VCORE", page).groups()
    (tmp_path / "mine.yaml").write_text((tmp_path / "mine.yaml").read_text().replace(begin, instead, 1))
    assert load_recipe(tmp_path / "mine.yaml").method.name == "vcore"


def test_recipes_that_the_documentation_names_exist() -> None:
    named = re.compile(r"\b(?:launch_scripts/recipes|presets|methods|parts|paper)/[\w./]+\.yaml")
    mentions = [(document, name) for document in DOCUMENTS for name in named.findall(document.read_text())]
    assert len(mentions) > 40
    for document, name in mentions:
        if not re.search("[A-Z]{4}", name):  # MODEL_TASK and the like
            assert (FOLDER / name.removeprefix("launch_scripts/recipes/")).is_file(), f"{document.name}: {name}"


ROOTS = [REPOSITORY, PACKAGE, REPOSITORY / "tests", REPOSITORY / "docs", REPOSITORY / "launch_scripts"]
"""Folders below which the documentation names files, the nearest root being understood."""
DECISIONS = REPOSITORY / "docs" / "decisions.md"
DATED = [REPOSITORY / "CHANGELOG.md", DECISIONS, *DECISIONS.with_suffix("").glob("*.md")]
CURRENT = [document for document in DOCUMENTS if document not in DATED]
"""Pages about the package as it is; entries of the others keep the names of their date."""


def read_inline_code(document: Path) -> list[str]:
    """Text between single backticks, outside of code blocks."""
    text = re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", text)


def is_there(name: str) -> bool:
    return any((root / name).exists() for root in ROOTS)


@functools.cache
def is_defined(package: str, name: str) -> bool:
    """Whether a package has a file, function, class, variable or attribute of this name."""
    definition = re.compile(rf"^\s*(?:(?:def|class) {name}\b|(?:self\.)?{name}\b[^\n()]*[:=])", re.MULTILINE)
    files = list((PACKAGE / package).rglob("*.py"))
    return any(file.stem == name or file.parent.name == name or definition.search(file.read_text()) for file in files)


def find_missing_names(document: Path) -> tuple[list[str], int]:
    """(names that lead nowhere, how many were looked up) of the paths and dotted names of a page.

    A path counts where it ends in .py or .md, or begins with a folder of ours; a dotted name where it begins with a
    package of ours. Recipe keys look like the latter (`data.train_path`, `engine.timeout_minutes`).
    """
    num_checked, missing = 0, []
    for words in read_inline_code(document):
        path = re.fullmatch(r"([\w.-]+)(?:/[\w./-]*)?", words.partition("::")[0])
        if (path and "/" in words and is_there(path[1])) or re.fullmatch(r"[\w./-]+\.(?:py|md)", words):
            # Not ds_configs/FILE and the like, nor what a run makes.
            if not re.search(r"/[A-Z]{3,}|^runs/", words):
                num_checked += 1
                missing += [words] * (not is_there(words.partition("::")[0]))
            continue
        dotted = re.match(r"(?:vcore_ds\.)?(\w+(?:\.\w+)+)", words)
        if dotted and dotted[1].split(".")[0] in LEVELS:
            section, *names = dotted[1].split(".")
            num_checked += 1
            is_key = section in SECTIONS and names[0] in SECTIONS[section].key_names()
            missing += [words] * (not is_key and not all(is_defined(section, name) for name in names))
    return missing, num_checked


def test_files_and_names_of_the_documentation_exist() -> None:
    found = {document.name: find_missing_names(document) for document in CURRENT}
    missing = {name: names for name, (names, _) in found.items() if names}
    assert not missing, "pages name files or code that do not exist (a rename?)"
    assert found["method.md"][1] > 40 and found["zero3.md"][1] > 20


def test_tests_against_known_problems_exist() -> None:
    page = (REPOSITORY / "tests" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:unit|dist|e2e|slurm)/test_\w+\.py)(?:::(\w+))?`", page)
    sources = {file: (REPOSITORY / "tests" / file).read_text(encoding="utf-8") for file, _ in named}
    assert len(named) > 35 and [test for file, test in named if test and f"\ndef {test}(" not in sources[file]] == []


def test_pages_that_the_package_names_exist() -> None:
    named = set(re.findall(r"docs/[\w/-]+\.md", "".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))))
    assert len(named) > 5 and [name for name in named if not (REPOSITORY / name).is_file()] == []


def test_links_lead_to_existing_files_and_headings() -> None:
    """Anchors by GitHub's rule: lower case, punctuation dropped, a hyphen for each space."""
    num_links, broken = 0, []
    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", document.read_text()):
            if "://" in target or not (target or anchor):
                continue
            num_links += 1
            page = document.parent / target if target else document
            headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE) if anchor and page.is_file() else []
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            if not page.exists() or (anchor and anchor not in anchors):
                broken.append(f"{document.name}: {target}#{anchor}")
    assert num_links > 30 and not broken


@pytest.mark.parametrize("index", [REPOSITORY / "docs" / "index.md", DECISIONS], ids=lambda path: path.stem)
def test_an_index_lists_every_page(index: Path) -> None:
    folder = DECISIONS.with_suffix("") if index == DECISIONS else index.parent
    listed = re.findall(r"^\| \[([\w.-]+)\]\((?:decisions/)?([\w.-]+)\) \|", index.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((path.name, path.name) for path in folder.glob("*.md") if path != index)


def test_the_newest_release_is_the_version() -> None:
    first, *headings = re.findall(r"^## (.*)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    releases = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in headings]
    assert first == "[Unreleased]" and all(releases)  # every heading has that form
    version = Version(vcore_ds.__version__)
    numbers = [tuple(map(int, release.groups()[:3])) for release in releases if release]
    days = [date.fromisoformat(release[4]) for release in releases if release]
    assert version.release > numbers[0] if version.is_devrelease else version.release == numbers[0]
    assert numbers == sorted(set(numbers), reverse=True) and days == sorted(days, reverse=True)


def test_the_architecture_describes_every_folder() -> None:
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")} - {"."}
    inner = re.findall(r"^\| `(\w+/\w+)/` \|", ARCHITECTURE, re.MULTILINE)
    assert sorted([*LEVELS, *inner]) == sorted(folders)


def find_long_lines(text: str) -> list[str]:
    """Lines of more than 120 characters outside of code blocks and tables; one word, such as a link, cannot be
    wrapped."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in prose.splitlines() if len(line) > 120 and " " in line.strip() and not line.startswith("|")]


def test_prose_is_wrapped_at_120_characters() -> None:
    assert [line for document in DOCUMENTS for line in find_long_lines(document.read_text(encoding="utf-8"))] == []


def test_only_prose_counts_as_a_long_line() -> None:
    words, link = "word " * 25, f"[text]({'x' * 120})"
    assert find_long_lines(f"{words}\n\n```\n{words}\n```\n| {words} |\n{link}\n- {words}") == [words, f"- {words}"]
