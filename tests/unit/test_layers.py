"""Imports point down, the heavy ones stay where they belong, and the recipe costs no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "vcore_ds"
LAYERS = (
    {"config", "disk", "errors", "signals"},
    {"method", "data", "models", "plan"},
    {"engine", "track"},
    {"step", "feed", "checkpoints", "run", "loop", "reference", "fidelity", "evaluation", "export", "preflight"}
    | {"quickstart_data"},
    {"cli", "quickstart", "torchrun", "__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
NEEDS_DEEPSPEED = {"engine", "torchrun"}


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
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


def violations(source: str, module: str) -> list[str]:
    """What a module `vcore_ds.PART...` imports against the layers, one line each."""
    part = module.split(".")[1]
    found = []
    for line, name in imports(source, module):
        top, *rest = name.split(".")
        where = f"{module}:{line} imports {name}"
        if top == "deepspeed" or name.startswith("torch.distributed"):
            if part not in NEEDS_DEEPSPEED:
                found.append(f"{where}: only engine/ may")
        elif top in {"torch", "transformers", "peft", "numpy"} and part in {"config", "errors", "signals"}:
            found.append(f"{where}: {part} stays free of it")
        elif top == "vcore_ds" and rest and rest[0] != "__version__":
            if part == "method" and rest[0] != "method":
                found.append(f"{where}: method/ imports nothing of ours")
            elif rest[0] in LEVEL and part in LEVEL and LEVEL[rest[0]] > LEVEL[part]:
                found.append(f"{where}: that points up")
    return found


def modules() -> list[tuple[Path, str]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    # A package's own name ends in __init__, so that one level of a relative import is the package itself.
    return [(path, ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)) for path in paths]


@pytest.mark.parametrize(("path", "module"), modules(), ids=[module for _, module in modules()])
def test_imports_point_down(path: Path, module: str) -> None:
    assert violations(path.read_text(encoding="utf-8"), module) == []


def test_every_part_has_a_layer() -> None:
    parts = {module.split(".")[1] for _, module in modules()} - {"__init__"}
    assert parts - set(LEVEL) == set(), "write the new part into LAYERS"


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from vcore_ds.run import train", "vcore_ds.engine.probe"),
        ("def late():\n    import vcore_ds.engine.zero3", "vcore_ds.data.batches"),
        ("from vcore_ds import engine", "vcore_ds.method.gibbs"),
        ("from vcore_ds.errors import UserError", "vcore_ds.method.gibbs"),
        ("from ..errors import UserError", "vcore_ds.method.gibbs"),
        ("from .. import run", "vcore_ds.track.metrics"),
        ("import deepspeed.comm", "vcore_ds.models.loading"),
        ("from deepspeed import zero", "vcore_ds.run"),
        ("import torch.distributed as dist", "vcore_ds.data.batches"),
        ("from torch import distributed", "vcore_ds.step"),
        ("from torch.distributed import all_reduce", "vcore_ds.track.metrics"),
        ("import torch", "vcore_ds.config.schema"),
        ("from transformers import AutoConfig", "vcore_ds.config.schema"),
    ],
)
def test_a_wrong_import_is_seen(source: str, module: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from vcore_ds.step import run_step", "vcore_ds.run"),
        ("from .zero3 import Engine", "vcore_ds.engine.probe"),
        ("from ..errors import UserError", "vcore_ds.data.batches"),
        ("import deepspeed\nimport torch.distributed", "vcore_ds.engine.probe"),
        ("import torch.nn.functional", "vcore_ds.method.gibbs"),
        ("from .gibbs import gibbs_weights", "vcore_ds.method.__init__"),
    ],
)
def test_a_right_import_passes(source: str, module: str) -> None:
    assert violations(source, module) == []


def test_config_imports_no_torch() -> None:
    code = (
        "import sys, vcore_ds.config\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "heavy = loaded & {'torch', 'transformers', 'deepspeed', 'peft', 'numpy'}\n"
        "print('loaded:', *sorted(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("loaded:\n", 0), result.stderr
