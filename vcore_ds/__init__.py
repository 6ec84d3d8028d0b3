"""VCORE: supervised fine-tuning in which every token is weighted by what learning it is worth.

The public Python API is `__all__`, described in docs/python.md; other names may change at any time. Names are imported
when they are first used: `import vcore_ds` takes no torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vcore_ds.common import __version__ as __version__

if TYPE_CHECKING:
    from vcore_ds.api.commands import score, train
    from vcore_ds.api.vcore_loss import (
        ProbeDirection,
        VcoreLoss,
        gibbs_weights,
        probe_direction,
        token_utilities,
    )
    from vcore_ds.common.errors import UserError
    from vcore_ds.engine.sharded import prepare_zero3
    from vcore_ds.training.run import RunResult

__all__ = [
    "ProbeDirection",
    "RunResult",
    "UserError",
    "VcoreLoss",
    "gibbs_weights",
    "prepare_zero3",
    "probe_direction",
    "score",
    "token_utilities",
    "train",
]

_MODULES = {
    "ProbeDirection": "vcore_ds.api.vcore_loss",
    "RunResult": "vcore_ds.training.run",
    "UserError": "vcore_ds.common.errors",
    "VcoreLoss": "vcore_ds.api.vcore_loss",
    "gibbs_weights": "vcore_ds.api.vcore_loss",
    "prepare_zero3": "vcore_ds.engine.sharded",
    "probe_direction": "vcore_ds.api.vcore_loss",
    "score": "vcore_ds.api.commands",
    "token_utilities": "vcore_ds.api.vcore_loss",
    "train": "vcore_ds.api.commands",
}

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and "-mvcore_ds" in "".join(sys.orig_argv):
    # `python -m vcore_ds...` puts the working folder first on the path, where the user's queue.py would hide Python's.
    del sys.path[0]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vcore_ds' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
