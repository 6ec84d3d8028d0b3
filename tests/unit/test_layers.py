"""Packages import only what docs/architecture.md allows, reductions name their axis, and limits of length hold."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "vcore_ds"

ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d) \| `(\w+)/` \| .* \| (.*) \|$", ARCHITECTURE, re.MULTILINE)
"""(level, package, imports) of the page's table."""
LEVELS = {package: int(level) for level, package, _ in ROWS}
MAY_IMPORT = {
    package: {other for other in LEVELS if LEVELS[other] < LEVELS[package]}
    if cell == "everything below"
    else set(re.findall(r"`(\w+)`", cell.partition(";")[0]))
    for _, package, cell in ROWS
}
"""The packages below it that a package may import."""

PUBLIC = "__init__"
"""The package's own file, which lists what is public: it imports from any package, but nothing at once."""

TAKE_WHOLE_RECIPES = {"config", "planning", "training", "commands"}
"""Packages whose functions may take a `Recipe`; those of the others say what they use of one."""

HEAVY = {"torch", "transformers", "peft", "deepspeed", "numpy", "datasets", "pyarrow"}
REDUCTIONS = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather_object", "get_rank", "get_world_size", "new_group",
    "reduce_scatter", "reduce_scatter_tensor", "scatter_object_list",
}  # fmt: skip
LAYOUT_FUNCTIONS = {
    "size", "rank", "group", "mesh", "sum_over", "norm_over", "gather_objects", "start_all_gather", "all_to_all",
    "all_gather",
}  # fmt: skip
AXES = {"data", "sequence", "tensor", "shards", "expert", "expert_shards", "job"}
BEFORE_ANY_LAYOUT = "vcore_ds.commands.preflight"
"""Measures the network in separate process groups, on ranks that are on no axes yet."""


def iter_imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import in a module, those inside functions included.

    `from a import b` gives `a.b`, since b may be a module; imports for type checkers only are imports too.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{prefix}.{alias.name}"


def find_package(module: str) -> str:
    """The package of a module; `__main__` is the command line."""
    package = module.split(".")[1]
    return "commands" if package == "__main__" else package


def find_violations(source: str, module: str) -> list[str]:
    """Imports of a module `vcore_ds.PACKAGE...` that the rules forbid, one line each."""
    package = find_package(module)
    problems = []
    for line, name in iter_imports(source, module):
        top, *rest = name.split(".")
        where = f"{module}:{line} imports {name}"
        if top == "deepspeed" and package != "engine":
            problems.append(f"{where}: only engine/ may")
        elif name.startswith("torch.distributed") and package not in {"engine", "distributed"}:
            if module != BEFORE_ANY_LAYOUT:
                problems.append(f"{where}: only distributed/ and engine/ may")
        elif top in HEAVY and package in {"config", "planning"}:
            problems.append(f"{where}: {package} stays free of it")
        elif name == "vcore_ds.config.schema.Recipe" and package not in TAKE_WHOLE_RECIPES:
            problems.append(f"{where}: {package} takes a section of it, or values")
        elif top == "vcore_ds" and rest and package != PUBLIC:
            imported = rest[0]
            if imported != package and imported not in MAY_IMPORT.get(package, set()):
                problems.append(f"{where}: {package} does without {imported}")
    return problems


def find_circle(sources: Mapping[str, str]) -> list[str]:
    """A circle of modules in which each imports the next, in functions too; empty where there is none. `sources` maps
    a module to its source."""
    imported: dict[str, set[str]] = {module: set() for module in sources}
    for module, source in sources.items():
        if module.endswith(".__init__"):
            continue  # a command's own file hands its options to the files beside it, which import their types
        for _, name in iter_imports(source, module):
            # A module, a package, or what one of them defines.
            owner = name.rpartition(".")[0]
            candidates = (name, f"{name}.__init__", owner, f"{owner}.__init__")
            target = next((candidate for candidate in candidates if candidate in sources), module)
            if target not in (module, f"vcore_ds.{PUBLIC}"):
                imported[module].add(target)
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def find_unnamed_reductions(source: str, module: str) -> list[str]:
    """Calls of collectives, or of a bare rank or world size, that name no axis of the layout."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        where = f"{module}:{node.lineno}: {ast.unparse(node.func)}"
        owner = ast.unparse(node.func.value)
        if owner in {"dist", "torch.distributed", "deepspeed.comm"} and node.func.attr in REDUCTIONS:
            calls.append(where)
        if owner == "layout" and node.func.attr in LAYOUT_FUNCTIONS:
            axis = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if axis not in AXES:
                calls.append(f"{where} without the name of an axis")
    return calls


def iter_imports_at_once(source: str) -> Iterator[str]:
    """Absolute names that importing the module imports: those outside functions and `if TYPE_CHECKING`."""
    open_nodes: list[ast.AST] = [ast.parse(source)]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            open_nodes += node.orelse if is_typing else ast.iter_child_nodes(node)


def list_modules() -> list[tuple[Path, str]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    # A package's own name ends in __init__, so that one level of a relative import is the package itself.
    return [(path, ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)) for path in paths]


def count_lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def count_words(paths: Iterable[Path]) -> int:
    """Words as `wc -w` counts them."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def receives_recipe(source: str) -> bool:
    """Whether a function of a module has a parameter whose annotation names `Recipe`, alone or in a union or a list."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    parameters = [part for function in functions for part in ast.walk(function.args) if isinstance(part, ast.arg)]
    return any(part.annotation and re.search(r"\bRecipe\b", ast.unparse(part.annotation)) for part in parameters)


SOURCES = {module: path.read_text(encoding="utf-8") for path, module in list_modules()}
DOCS = REPOSITORY / "docs"
PYTHON = [path for path, _ in list_modules()]
PAGES = [path for suffix in ("js", "css", "html") for path in PACKAGE.rglob(f"*.{suffix}")]
GUIDES = [path for path in DOCS.glob("*.md") if path.name not in ("keys.md", "decisions.md")]  # keys.md is generated
REPORTS = list((DOCS / "reports").glob("*.md"))
DECISIONS = [DOCS / "decisions.md", *(DOCS / "decisions").glob("*.md")]

LIMITS: dict[str, tuple[int, Callable[[], int]]] = {
    "lines of Python in the package": (36_100, lambda: count_lines(PYTHON)),
    "Python files in the package": (176, lambda: len(PYTHON)),
    "files with a function that receives a whole Recipe": (15, lambda: sum(map(receives_recipe, SOURCES.values()))),
    "lines of JavaScript, CSS and HTML in the package": (927, lambda: count_lines(PAGES)),
    "lines of Python in tests": (49_400, lambda: count_lines((REPOSITORY / "tests").rglob("*.py"))),
    "words of guides": (26_400, lambda: count_words(GUIDES)),
    "words of the longest guide": (1_500, lambda: max(count_words([path]) for path in GUIDES)),
    "words of reports": (14_700, lambda: count_words(REPORTS)),
    "reports": (10, lambda: len(REPORTS)),
    "words of decisions": (6_400, lambda: count_words(DECISIONS)),
    "words of the changelog": (1_700, lambda: count_words([REPOSITORY / "CHANGELOG.md"])),
}
"""What is counted, its limit, and how. A change that needs more makes room first; lower a limit when you can."""


@pytest.mark.parametrize("counted", LIMITS)
def test_the_repository_stays_within_its_limits(counted: str) -> None:
    limit, measure = LIMITS[counted]
    assert limit / 2 < measure() <= limit, "the lower bound shows that something is counted"


def test_packages_import_what_the_architecture_allows_and_use_all_of_it() -> None:
    assert [problem for module, source in SOURCES.items() for problem in find_violations(source, module)] == []
    packages = {find_package(module) for module in SOURCES} - {PUBLIC}
    assert packages == LEVELS.keys() and [level for level, *_ in ROWS] == sorted((row[0] for row in ROWS), reverse=True)
    allowed = {(package, target) for package, targets in MAY_IMPORT.items() for target in targets}
    assert all(LEVELS[target] < LEVELS[package] for package, target in allowed)
    used = {
        (find_package(module), name.split(".")[1])
        for module, source in SOURCES.items()
        for _, name in iter_imports(source, module)
        if name.startswith("vcore_ds.")
    }
    assert allowed <= used


def test_no_files_import_each_other_in_a_circle() -> None:
    assert find_circle(SOURCES) == []
    circle = {
        "vcore_ds.training.run": "from vcore_ds.training import loop",
        "vcore_ds.training.loop": "def f():\n    from vcore_ds.training.step import take",
        "vcore_ds.training.step": "import vcore_ds.training.run",
    }
    assert set(find_circle(circle)) == set(circle)
    assert find_circle(circle | {"vcore_ds.training.step": "import vcore_ds.common.text"}) == []


def test_names_are_imported_from_the_files_that_define_them() -> None:
    """A package's own file re-exports nothing; that of a command is the command, and the first lists what is public."""
    public = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    assert sorted(iter_imports_at_once(public)) == ["importlib", "sys", "typing", "vcore_ds.common"]
    for path in PACKAGE.glob("*/**/__init__.py"):
        folder = path.parent.relative_to(PACKAGE)
        if not folder.is_relative_to("commands"):
            imported = [name for _, name in iter_imports(path.read_text(encoding="utf-8"), "vcore_ds.__init__")]
            assert imported == (["vcore_ds.engine.deepspeed_start"] if str(folder) == "engine" else []), path


def test_every_reduction_names_its_axis() -> None:
    for module, source in SOURCES.items():
        if not module.startswith("vcore_ds.distributed") and module != BEFORE_ANY_LAYOUT:
            assert find_unnamed_reductions(source, module) == []


def test_a_run_without_tensor_parallel_layers_imports_no_megatron() -> None:
    """It brings wandb and much else: 0.8 of the 6.7 s of processor time that a rank needed for its imports."""
    slices = "vcore_ds.models.megatron.weight_slices"  # which is checked like the modules that import it
    for module, source in SOURCES.items():
        if ".megatron." not in module or module == slices:
            names = set(iter_imports_at_once(source))
            assert {name for name in names if name.startswith(("megatron", "vcore_ds.models.megatron"))} <= {slices}
    source = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ntry:\n    import c\nfinally:\n    pass"
    assert list(iter_imports_at_once(source)) == ["c", "b"]


def count_imports(source: str, module: str) -> int:
    return len(find_violations(source, f"vcore_ds.{module}"))


def count_reductions(source: str, module: str) -> int:
    return len(find_unnamed_reductions(source, f"vcore_ds.{module}"))


def count_receivers(parameters: str, _: str) -> int:
    return int(receives_recipe(f"class A:\n    def f(self, {parameters}) -> Recipe: ..."))


@pytest.mark.parametrize(
    ("count", "expected", "source", "module"),
    [
        (count_imports, 1, "from vcore_ds.training.run import train", "engine.zero3"),
        (count_imports, 1, "def late():\n    import vcore_ds.engine.zero3", "data.batches"),
        (count_imports, 1, "from vcore_ds import engine", "method.weights"),
        (count_imports, 1, "from ..common.errors import UserError", "method.weights"),
        (count_imports, 1, "from vcore_ds.config.schema import Recipe", "utility.direction"),
        (count_imports, 1, "import deepspeed.comm", "models.causal_lm"),
        (count_imports, 1, "from deepspeed import zero", "training.run"),
        (count_imports, 1, "import torch.distributed as dist", "commands.train"),
        (count_imports, 1, "from torch import distributed", "training.step"),
        (count_imports, 1, "import torch", "config.schema"),
        (count_imports, 1, "from transformers import AutoConfig", "planning.batch_layout"),
        (count_imports, 0, "from .zero3 import Engine", "engine.zero3"),
        (count_imports, 0, "from ..common.errors import UserError", "data.batches"),
        (count_imports, 0, "import deepspeed\nimport torch.distributed", "engine.zero3"),
        (count_imports, 0, "import torch.distributed", "distributed.layout"),
        (count_imports, 0, "import torch.distributed", "commands.preflight"),
        (count_imports, 0, "import torch.nn.functional", "method.weights"),
        (count_imports, 0, "from .tokens import Tokens", "method.__init__"),
        (count_imports, 0, "from vcore_ds.commands import check", "commands.train"),
        (count_reductions, 1, "dist.all_reduce(x)", "training.step"),
        (count_reductions, 1, "import torch\ntorch.distributed.barrier()", "training.step"),
        (count_reductions, 1, "layout.sum_over(axis, [1.0])", "training.step"),
        (count_reductions, 1, "layout.rank()", "training.step"),
        (count_reductions, 1, "layout.gather_objects('world', 1)", "training.step"),
        (count_reductions, 0, "layout.sum_over('shards', [1.0])\nlayout.rank('job')", "training.step"),
        (count_receivers, 1, "recipe: Recipe", ""),
        (count_receivers, 1, "*, old: 'Recipe' | None = None", ""),
        (count_receivers, 1, "recipes: list[Recipe] | None", ""),
        (count_receivers, 0, "batch: BatchConfig", ""),
    ],
)
def test_what_is_looked_for_is_detected(
    count: Callable[[str, str], int], expected: int, source: str, module: str
) -> None:
    assert count(source, module) == expected
