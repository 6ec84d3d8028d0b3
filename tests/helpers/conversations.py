"""Conversations to tokens and stores, with the parts that `prepare` is made of."""

from collections.abc import Sequence
from pathlib import Path

from vcore_ds.data import Conversation, TokenizedSequence, TokenStore, write_store
from vcore_ds.data.rendering import check_tokenizer, render_conversation
from vcore_ds.data.tokenization import tokenize_rendered


def tokenize(conversations: Sequence[Conversation], tokenizer) -> list[TokenizedSequence]:
    """Whole sequences; the id of each is its row, from 0."""
    check_tokenizer(tokenizer)
    return tokenize_rendered([render_conversation(item, tokenizer) for item in conversations], tokenizer)


def store(folder: Path, sequences: Sequence[TokenizedSequence], tokenizer) -> TokenStore:
    """Written to `folder` and opened."""
    write_store(folder, sequences, tokenizer)
    return TokenStore(folder, tokenizer)
