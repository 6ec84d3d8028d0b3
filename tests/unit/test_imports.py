import importlib
import os

import pytest
import torch

from vcore_ds.files.imports import SWITCH, without_compiler


def is_compiled(function: object) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable")


@pytest.mark.parametrize("before", [None, "0"])
def test_a_module_that_is_imported_without_the_compiler_keeps_its_functions(tmp_path, monkeypatch, before):
    if before is None:
        monkeypatch.delenv(SWITCH, raising=False)
    else:
        monkeypatch.setenv(SWITCH, before)
    name = f"compiles_on_import_{before}"
    (tmp_path / f"{name}.py").write_text("import torch\n\n\n@torch.compile\ndef double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    with without_compiler():
        module = importlib.import_module(name)
    assert not is_compiled(module.double) and module.double(3) == 6
    assert os.environ.get(SWITCH) == before
    assert is_compiled(torch.compile(module.double))
