"""Imports of packages of which a part is used, and imports that last."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

from vcore_ds.common.imports import SWITCH, without_compiler

CODE = """
import gc
from vcore_ds.common.imports import lasting_imports

try:
    with lasting_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
        raise ImportError
except ImportError:
    pass
assert gc.isenabled() and gc.get_freeze_count() > 1000
assert not any(kept is made for kept in gc.get_objects())
frozen = gc.get_freeze_count()
with lasting_imports():
    assert gc.isenabled()
    later = [[] for _ in range(1000)]
assert gc.get_freeze_count() <= frozen and any(kept is later for kept in gc.get_objects())
"""


@pytest.mark.parametrize("before", [None, "0"])
def test_a_module_that_is_imported_without_the_compiler_keeps_its_functions(tmp_path, monkeypatch, before):
    monkeypatch.delenv(SWITCH, raising=False)
    if before is not None:
        monkeypatch.setenv(SWITCH, before)
    name = f"compiles_on_import_{before}"
    (tmp_path / f"{name}.py").write_text("import torch\n\n\n@torch.compile\ndef double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    with without_compiler():
        module = importlib.import_module(name)
    assert not hasattr(module.double, "_torchdynamo_orig_callable") and module.double(3) == 6
    assert os.environ.get(SWITCH) == before
    assert hasattr(torch.compile(module.double), "_torchdynamo_orig_callable")


def test_lasting_imports_are_excluded_from_garbage_collection_once() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
