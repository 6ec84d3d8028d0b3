"""What every rank imports; imported once by the server that ranks are forked from."""

from vcore_ds.common.imports import lasting_imports

with lasting_imports():  # garbage collection would look through all of it, here and at the start of every engine
    import pytest  # noqa: F401

    import tests.helpers.megatron  # noqa: F401
    import vcore_ds.train.run  # noqa: F401
