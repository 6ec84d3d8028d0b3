"""Loading a pretrained model straight into ZeRO-3 shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from vcore_ds.engine.deepspeed_start import start_deepspeed


@contextmanager
def sharded_loading(deepspeed_config: dict[str, Any]) -> Iterator[None]:
    """A context in which `from_pretrained` keeps only this rank's shards, so that no host holds one model per rank.

    transformers finds out through a global weak reference whether ZeRO-3 is on: its target must stay alive meanwhile.
    """
    start_deepspeed()
    announced = HfDeepSpeedConfig(deepspeed_config)
    try:
        yield
    finally:
        del announced
        unset_hf_deepspeed_config()
