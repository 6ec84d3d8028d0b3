"""Lengths of the sequences in local data, for a plan: read from a token store, or from the first rows of raw data."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from vcore_ds.commands.plan.lengths import LengthModel
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import is_readable
from vcore_ds.config.data_section import DataConfig
from vcore_ds.data.conversations import Conversation, check_tokenizer, render_conversation
from vcore_ds.data.messages import Malformed
from vcore_ds.data.prepare.rows import read_chat_rows
from vcore_ds.data.prepare.sources import find_files
from vcore_ds.data.store import MANIFEST, TokenStore
from vcore_ds.data.tokenization import load_tokenizer, tokenize_rendered
from vcore_ds.planning.known_models import find_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_ROWS = 256  # rows of raw data that are tokenized, which takes a second or two

_MAX_LENGTHS = 4096  # lengths of a token store that are kept


def sample_lengths(
    data: DataConfig, model_path: str, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> LengthModel | None:
    """Sample the lengths of data.train_path and data.probe_path. `tokenizer`: the model's, if it is loaded. None if the
    training data are not on this machine, have no sequence within data.cutoff_length, or are raw data and the model's
    tokenizer is not here. Raises UserError for a damaged token store or an unreadable file."""
    files = data.train_files()
    if not all(is_readable(file.path) for file in files):
        return None
    tokenizer = find_tokenizer(model_path, tokenizer)
    samples, totals = zip(*(_read(file.path, data, tokenizer) for file in files), strict=True)
    if not all(samples):
        return None
    num_read, sum_weights = sum(map(len, samples)), sum(file.weight for file in files)
    lengths: list[int] = []
    for sample, file in zip(samples, files, strict=True):
        number = max(1, round(min(num_read, _MAX_LENGTHS) * file.weight / sum_weights))
        # Evenly spaced; some several times if there are fewer.
        lengths += [sample[i * len(sample) // number] for i in range(number)]
    num_sequences = None if None in totals else sum(total or 0 for total in totals)
    probe: list[int] = []
    if data.probe_path is not None and is_readable(data.probe_path):
        probe, _ = _read(data.probe_path, data, tokenizer)
    which = f"the {num_sequences:,}" if num_sequences is not None else f"the first {num_read:,}"
    mean = sum(lengths) / len(lengths)
    source = f"{which} sequences of {data.train_name()}, mean {mean:,.0f} tokens, longest {max(lengths):,}"
    return LengthModel(mean, tuple(lengths), tuple(probe), num_sequences, source)


def _read(path: str, data: DataConfig, tokenizer: "PreTrainedTokenizerBase | None") -> tuple[list[int], int | None]:
    """Read lengths, none of raw data without a tokenizer, and the total number of sequences; None if not all were
    read."""
    if (Path(path) / MANIFEST).is_file():
        lengths = TokenStore(path).lengths.tolist()
        return lengths, len(lengths)
    if tokenizer is None:
        return [], None
    conversations, is_all = _read_conversations(path, data.columns)
    lengths = _count_tokens(conversations, tokenizer)
    if data.overlong == "drop":
        lengths = [n for n in lengths if n <= data.cutoff_length]
    return [min(n, data.cutoff_length) for n in lengths], len(lengths) if is_all else None


def _read_conversations(path: str, columns: Mapping[str, str]) -> tuple[list[Conversation], bool]:
    """Read the first conversations of each file of raw data; also return whether these are all."""
    files = find_files([path], "train")
    max_rows = max(1, _MAX_ROWS // len(files))
    conversations: list[Conversation] = []
    is_all = True
    for file in files[:_MAX_ROWS]:
        rows = list(islice(read_chat_rows(file, columns), max_rows + 1))
        is_all = is_all and len(rows) <= max_rows
        conversations += rows[:max_rows]
    return conversations, is_all and len(files) <= _MAX_ROWS


def find_tokenizer(
    model_path: str, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer of a model on this machine, unless it is given; None if there is none that renders
    conversations."""
    try:
        if tokenizer is None:
            if (folder := find_folder(model_path)) is None:
                return None
            tokenizer = load_tokenizer(str(folder))
        check_tokenizer(tokenizer)
    except UserError:  # the run reports it
        return None
    return tokenizer


def _count_tokens(conversations: Sequence[Conversation], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    rendered = []
    for conversation in conversations:
        with suppress(Malformed):  # refused by the template; the run reports it
            rendered.append(render_conversation(conversation, tokenizer))
    return [len(sequence) for sequence in tokenize_rendered(rendered, tokenizer)] if rendered else []
