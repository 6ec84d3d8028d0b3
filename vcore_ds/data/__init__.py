"""Chat data: reading, tokens with supervision, the training order, batches. No collectives; the same on all ranks."""

from vcore_ds.data.batches import IGNORED_LABEL, Batch, collate, idle_batch, merge_batches, pack
from vcore_ds.data.cache import cache_root, store_of
from vcore_ds.data.conversations import Conversation, Message
from vcore_ds.data.dataset import Dataset, JoinedDataset, keep_random_tokens
from vcore_ds.data.order import MainOrder, RandomDraws
from vcore_ds.data.rendering import render_prompt
from vcore_ds.data.sequence_log_probabilities import with_reference, write_reference
from vcore_ds.data.step_batches import StepBatches
from vcore_ds.data.store import TokenStore, write_store
from vcore_ds.data.store_checks import check_contents
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer

__all__ = [
    "IGNORED_LABEL",
    "Batch",
    "Conversation",
    "Dataset",
    "JoinedDataset",
    "MainOrder",
    "Message",
    "RandomDraws",
    "StepBatches",
    "TokenStore",
    "TokenizedSequence",
    "cache_root",
    "check_contents",
    "collate",
    "idle_batch",
    "keep_random_tokens",
    "load_tokenizer",
    "merge_batches",
    "pack",
    "render_prompt",
    "store_of",
    "with_reference",
    "write_reference",
    "write_store",
]
