"""What every rank imports; imported once by the server that ranks are forked from."""

import gc

import pytest  # noqa: F401

import tests.helpers.megatron  # noqa: F401
import vcore_ds.train.run  # noqa: F401

gc.freeze()  # DeepSpeed collects garbage whenever it starts; what was imported is none
