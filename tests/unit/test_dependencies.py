"""pyproject.toml declares what the package imports, and nothing else."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

MODULES = {"pyyaml": "yaml", "megatron-core": "megatron"}
"""Distribution -> the module that it brings, where the name differs in more than a dash."""
IF_INSTALLED = {"triton", "transformer_engine"}
"""Come with PyTorch for GPUs, or are installed for a machine; the code does without."""
IMPORTED_BY_OTHERS = {"gguf"}
"""transformers imports it to read the quickstart's model."""
TOOLS = {"pytest", "pytest-timeout", "pytest-xdist", "ruff", "mypy", "types-pyyaml", "setuptools"}
"""Of the extra `test`: run, not imported."""
USERS = {
    "matplotlib": {"commands/plan", "commands/report", "common/text.py"},
    "math_verify": {"data/answers.py"},
    **{name: {"commands/evaluate"} for name in ("inspect_ai", "openai", "reasoning_gym", "httpx", "anyio", "tenacity")},
}
"""Module of an extra -> where it is imported. Each of these places says which extra is missing."""


def imported_modules(folder: Path) -> Iterator[tuple[str, str]]:
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


def distributions(requirements: Iterable[str]) -> set[str]:
    """Names of distributions, without this one."""
    names = {re.split(r"[\[<>=~! ;]", requirement)[0].lower() for requirement in requirements}
    return names - {"vcore_ds"}


def modules(requirements: Iterable[str]) -> set[str]:
    return {MODULES.get(name, name.replace("-", "_")) for name in distributions(requirements)}


def test_what_the_package_imports_is_declared_and_the_reverse() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = modules(PROJECT["dependencies"])
    optional = modules(requirement for name in extras.keys() - {"test"} for requirement in extras[name])
    imported = {name for name, _ in imported_modules(REPOSITORY / "vcore_ds")} - IF_INSTALLED
    assert imported - optional == declared
    assert optional - imported == IMPORTED_BY_OTHERS and not optional & declared


def test_what_tests_import_is_declared() -> None:
    """But of folders whose tests need an environment of their own, or skip."""
    imported = {
        name
        for name, path in imported_modules(REPOSITORY / "tests")
        if not path.startswith(("rl/", "benchmarks/", "experiments/", "gpu/"))
    }
    extras = PROJECT["optional-dependencies"]
    declared = modules([*PROJECT["dependencies"], *(word for extra in extras.values() for word in extra)])
    assert imported <= declared, imported - declared
    unused = distributions(extras["test"]) - {name.replace("_", "-") for name in imported} - TOOLS - IF_INSTALLED
    assert unused == set(), unused


def test_extras_are_imported_where_a_message_names_them() -> None:
    for name, path in imported_modules(REPOSITORY / "vcore_ds"):
        if name in USERS:
            assert path.startswith(tuple(USERS[name])), f"{path} imports {name}, which is in an extra"


def test_constraints_pin_every_declared_distribution() -> None:
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in (REPOSITORY / "constraints.txt").open()}
    extras = PROJECT["optional-dependencies"].values()
    declared = distributions([*PROJECT["dependencies"], *(word for extra in extras for word in extra)])
    missing = {name for name in declared if name.replace("_", "-") not in pinned}
    assert missing == set()


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
        own = re.findall(r"vcore_ds\[(.*?)\]", " ".join(extras[name]))
        waiting += [other for names in own for other in names.split(",") if other not in installed]
    assert installed == extras.keys()


def test_the_image_has_what_a_build_needs() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()}
    folders = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    needed = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "constraints.txt", "vcore_ds"}
    assert copied == needed | {folder.partition("/")[0] for folder in folders}
    assert all((REPOSITORY / name).exists() for name in copied)
    (extras,) = re.findall(r"'\.\[(.*)\]' -c constraints.txt", text)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
