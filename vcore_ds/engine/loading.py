"""Loading a pretrained model straight into ZeRO-3 shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from vcore_ds.engine.deepspeed_start import start_deepspeed


@contextmanager
def sharded_loading(deepspeed_config: dict[str, Any]) -> Iterator[None]:
    """Inside, `from_pretrained` keeps this rank's shards only, so that no host has to hold the model once per rank.

    transformers asks a global weak reference whether ZeRO-3 is on: the object must stay alive while loading.
    """
    start_deepspeed()
    announced = HfDeepSpeedConfig(deepspeed_config)
    try:
        yield
    finally:
        del announced
        unset_hf_deepspeed_config()
