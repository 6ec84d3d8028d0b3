"""Chat data: reading, tokens with supervision, the training order, batches. No collectives; the same on all ranks."""

from vcore_ds.data.answers import keep_random_tokens
from vcore_ds.data.batches import IGNORED_LABEL, Batch, collate, idle_batch, merge_batches, pack
from vcore_ds.data.conversations import Conversation, Message, read_conversations
from vcore_ds.data.order import MainOrder, ProbeStream, split_batch
from vcore_ds.data.packing import pack_batch
from vcore_ds.data.reference import with_reference, write_reference
from vcore_ds.data.rendering import render_prompt
from vcore_ds.data.store import TokenStore, write_store
from vcore_ds.data.tokenization import Dataset, TokenizationReport, TokenizedSequence, tokenize_conversations

__all__ = [
    "IGNORED_LABEL",
    "Batch",
    "Conversation",
    "Dataset",
    "MainOrder",
    "Message",
    "ProbeStream",
    "TokenStore",
    "TokenizationReport",
    "TokenizedSequence",
    "collate",
    "idle_batch",
    "keep_random_tokens",
    "merge_batches",
    "pack",
    "pack_batch",
    "read_conversations",
    "render_prompt",
    "split_batch",
    "tokenize_conversations",
    "with_reference",
    "write_reference",
    "write_store",
]
