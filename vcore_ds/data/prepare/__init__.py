"""Raw data to a token store: reading, curation, sampling, tokenization. No collectives; alone, before any training."""

from vcore_ds.data.prepare.pipeline import TooManyFaults, prepare
from vcore_ds.data.prepare.report import PrepareReport
from vcore_ds.data.prepare.request import HUB_IDS, SPLITS, PrepareRequest, describe_origin
from vcore_ds.data.prepare.sources import find_shards

__all__ = [
    "HUB_IDS",
    "SPLITS",
    "PrepareReport",
    "PrepareRequest",
    "TooManyFaults",
    "describe_origin",
    "find_shards",
    "prepare",
]
