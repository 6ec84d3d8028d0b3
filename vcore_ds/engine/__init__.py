"""A model under ZeRO-3: loading, passes, shards, the optimizer's step. The only package that imports deepspeed."""

import vcore_ds.engine.deepspeed_start  # noqa: F401  before any module that imports deepspeed
