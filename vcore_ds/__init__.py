"""VCORE: supervised fine-tuning in which every token is weighted by what learning it is worth.

The public Python API is `__all__`, described in docs/python.md; other names may change at any time. Names are imported
when they are first used: `import vcore_ds` takes no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcore_ds.commands.python_api import score, train
    from vcore_ds.common.errors import UserError
    from vcore_ds.train.run import RunResult
    from vcore_ds.utility.one_process import ProbeDirection, gibbs_weights, probe_direction, token_utilities

__version__ = "0.7.0"

__all__ = [
    "ProbeDirection",
    "RunResult",
    "UserError",
    "gibbs_weights",
    "probe_direction",
    "score",
    "token_utilities",
    "train",
]

_MODULES = {
    "ProbeDirection": "vcore_ds.utility.one_process",
    "RunResult": "vcore_ds.train.run",
    "UserError": "vcore_ds.common.errors",
    "gibbs_weights": "vcore_ds.utility.one_process",
    "probe_direction": "vcore_ds.utility.one_process",
    "score": "vcore_ds.commands.python_api",
    "token_utilities": "vcore_ds.utility.one_process",
    "train": "vcore_ds.commands.python_api",
}


class _CallableModule(ModuleType):
    """The package `vcore_ds.train`, which can be called as the function of that name."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return import_module(_MODULES["train"]).train(*arguments, **keywords)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # An import of vcore_ds.train binds that package to the name of the function.
        if name == "train" and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vcore_ds' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
