"""Tokenized conversations and stores, made by the same functions as in `vcore-ds prepare`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vcore_ds.data.conversations import Conversation, check_tokenizer, render_conversation
from vcore_ds.data.messages import check_messages
from vcore_ds.data.store import TokenStore, write_store
from vcore_ds.data.tokenization import TokenizedSequence, tokenize_rendered


def tokenize(conversations: Sequence[Conversation], tokenizer) -> list[TokenizedSequence]:
    """Tokenize without truncation; the id of a sequence is its row, from 0. Thinking may be in the messages' text."""
    check_tokenizer(tokenizer)
    read = [replace(item, messages=check_messages(item.messages)[0]) for item in conversations]
    return tokenize_rendered([render_conversation(item, tokenizer) for item in read], tokenizer)


def store(folder: Path, sequences: Sequence[TokenizedSequence], tokenizer) -> TokenStore:
    """Write the sequences to a store in `folder` and open it."""
    write_store(folder, sequences, tokenizer)
    return TokenStore(folder, tokenizer)
