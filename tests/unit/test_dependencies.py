"""pyproject.toml declares what the package imports, and nothing else."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

MODULES = {"pyyaml": "yaml", "megatron-core": "megatron"}
"""Distribution -> the module that it brings, where the name differs in more than a dash."""
IF_INSTALLED = {"triton"}
"""Come with PyTorch for GPUs; the code does without."""
IMPORTED_BY_OTHERS = {"gguf", "antlr4_python3_runtime"}
"""transformers imports the first to read the quickstart's model, math-verify the second."""
TOOLS = {"pytest", "pytest-timeout", "pytest-xdist", "ruff", "mypy", "types-pyyaml", "setuptools"}
"""Packages of the extra `test` that are run, not imported."""
USERS = {
    "matplotlib": {"commands/plan", "commands/report", "common/text.py"},
    "math_verify": {"data/answers.py"},
    **{name: {"commands/evaluate"} for name in ("inspect_ai", "openai", "reasoning_gym", "httpx", "anyio", "tenacity")},
}
"""Module of an extra -> where it is imported. Each of these places says which extra is missing."""


def iter_imported_modules(folder: Path) -> Iterator[tuple[str, str]]:
    """(module, path below the folder) of every import of another distribution."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                names = [node.module]
            for name in {name.partition(".")[0] for name in names}:
                if name not in sys.stdlib_module_names and not (REPOSITORY / name).is_dir():
                    yield name, path.relative_to(folder).as_posix()


def parse_distributions(requirements: Iterable[str]) -> set[str]:
    """Names of distributions, without this one."""
    names = {re.split(r"[\[<>=~! ;]", requirement)[0].lower() for requirement in requirements}
    return names - {"vcore_ds"}


def list_modules(requirements: Iterable[str]) -> set[str]:
    return {MODULES.get(name, name.replace("-", "_")) for name in parse_distributions(requirements)}


def test_the_package_imports_what_is_declared_and_nothing_else() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = list_modules(PROJECT["dependencies"])
    optional = list_modules(requirement for name in extras.keys() - {"docs", "test"} for requirement in extras[name])
    imported = {name for name, _ in iter_imported_modules(REPOSITORY / "vcore_ds")} - IF_INSTALLED
    assert (imported - optional) | {"wandb"} == declared  # wandb is imported by accelerate
    assert optional - imported == IMPORTED_BY_OTHERS and not optional & declared


def test_packages_that_tests_import_are_declared() -> None:
    """Except in folders whose tests need a separate environment, or skip."""
    imported = {
        name
        for name, path in iter_imported_modules(REPOSITORY / "tests")
        if not path.startswith(("rl/", "benchmarks/", "experiments/", "gpu/"))
    }
    extras = PROJECT["optional-dependencies"]
    declared = list_modules([*PROJECT["dependencies"], *(word for extra in extras.values() for word in extra)])
    assert imported <= declared, imported - declared
    unused = parse_distributions(extras["test"]) - {name.replace("_", "-") for name in imported} - TOOLS - IF_INSTALLED
    assert unused == set(), unused


def test_extras_are_imported_where_a_message_names_them() -> None:
    for name, path in iter_imported_modules(REPOSITORY / "vcore_ds"):
        if name in USERS:
            assert path.startswith(tuple(USERS[name])), f"{path} imports {name}, which is in an extra"


def test_constraints_pin_every_declared_distribution() -> None:
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in (REPOSITORY / "constraints.txt").open()}
    extras = PROJECT["optional-dependencies"].values()
    declared = parse_distributions([*PROJECT["dependencies"], *(word for extra in extras for word in extra)])
    missing = {name for name in declared if name.replace("_", "-") not in pinned}
    assert missing == set()


def test_extras_of_other_distributions_have_the_names_that_pip_finds() -> None:
    """pip warns of others, such as those with an underscore, and leaves them out."""
    extras = PROJECT["optional-dependencies"].values()
    for word in [*PROJECT["dependencies"], *(word for extra in extras for word in extra)]:
        match = re.match(r"([\w-]+)\[(.*?)\]", word)
        if match is not None and match[1] != PROJECT["name"]:
            assert set(match[2].split(",")) <= set(metadata(match[1]).get_all("Provides-Extra") or ()), word


def test_the_environment_of_the_tests_has_every_extra() -> None:
    """`make .venv` installs demo and test."""
    makefile = (REPOSITORY / "Makefile").read_text()
    (line,) = re.findall(r"\n\$\(BIN\)/installed-tests: EXTRAS := (.*)\n", makefile)
    extras = PROJECT["optional-dependencies"]
    installed: set[str] = set()
    waiting = line.split(",")
    while waiting:
        name = waiting.pop()
        installed.add(name)
        nested = re.findall(r"vcore_ds\[(.*?)\]", " ".join(extras[name]))
        waiting += [extra for names in nested for extra in names.split(",") if extra not in installed]
    assert installed == extras.keys()


def test_the_image_copies_what_a_build_needs() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()}
    folders = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    needed = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "constraints.txt", "vcore_ds"}
    assert copied == needed | {folder.partition("/")[0] for folder in folders}
    assert all((REPOSITORY / name).exists() for name in copied)
    (extras,) = re.findall(r"'\.\[(.*)\]' -c constraints.txt", text)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
