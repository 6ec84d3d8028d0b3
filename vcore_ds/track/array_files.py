"""Files of arrays in a run's `tokens/`: written whole or not at all, and named where they are damaged. numpy only."""

import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from vcore_ds.errors import UserError
from vcore_ds.files.aside import written_aside
from vcore_ds.files.user_paths import reading


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """Writes a compressed `.npz`, the same bytes for the same arrays, and returns its path. Raises OSError."""
    # In memory first, so that a disk without room fails in one place, with an OSError.
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # one may be called allow_pickle; none is
    with written_aside(path) as unfinished:
        unfinished.write_bytes(content.getbuffer())
    return path


@contextmanager
def arrays_of(path: Path, expected: str, file_format: int) -> Iterator[dict[str, np.ndarray]]:
    """The arrays of a file, by name; what is wrong with them, here or in the block, becomes a UserError that names it.

    Args:
        expected: what the file should be, in words.
        file_format: what its array `format` should hold.

    Raises:
        UserError: the file cannot be read, is damaged, or has another format.
    """
    try:
        with reading("", path, expected), np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        if int(arrays["format"]) != file_format:
            raise UserError(f"{path}: found format {int(arrays['format'])}; expected {file_format}, of this version")
        yield arrays
    except (ValueError, TypeError, KeyError, IndexError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{path}: is damaged: {error}; expected {expected}. Remove it: the other records of the run can be read"
        ) from None


def join_tokens(sequences: Sequence[Sized], names: Sequence[str]) -> dict[str, np.ndarray]:
    """The tokens of sequences, one sequence behind the other, as arrays of a file; `num_tokens` tells them apart.

    Args:
        names: attributes of every sequence, each an array with a value for each token; None leaves the array out.
    """
    columns = {name: [getattr(sequence, name) for sequence in sequences] for name in names}
    joined = {name: np.concatenate(parts) for name, parts in columns.items() if all(part is not None for part in parts)}
    return {"num_tokens": np.array([len(sequence) for sequence in sequences], dtype=np.int64), **joined}


def split_tokens(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> list[dict[str, np.ndarray]]:
    """Each sequence's own part of what `join_tokens` has joined, by name, without those that are not there. Raises
    ValueError where their lengths do not add up."""
    ends = np.cumsum(arrays["num_tokens"]).tolist()
    if any(name in arrays and len(arrays[name]) != ends[-1] for name in names):
        raise ValueError("arrays of different lengths")
    own = [slice(*bounds) for bounds in zip([0, *ends], ends, strict=False)]
    return [{name: arrays[name][part] for name in names if name in arrays} for part in own]
