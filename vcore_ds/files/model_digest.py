"""A digest of a model's weights and configuration, which tells models apart and does not read 100 GB."""

import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download

from vcore_ds.errors import UserError
from vcore_ds.files.safetensors_ranges import BadSafetensors, read_header
from vcore_ds.files.user_paths import reading

RULE = "2:"
"""What a digest begins with. Those of vcore_ds 0.7 and before have no such prefix: they were of the first and the last
MiB of each safetensors file."""

_DESCRIPTIONS = ("config.json", "adapter_config.json", "*.index.json")
_WEIGHTS = ("*.safetensors", "*.bin")
_WHOLE_BYTES = 512 * 2**20
"""Weights up to this size are hashed whole, which takes a second (SHA-256: 520 MB/s on one core)."""
_STEP_BYTES = 4 * 2**20
"""Distance between two samples: every matrix of a layer, and every expert of a fused tensor, is larger."""
_SAMPLE_BYTES = 4096


def local_folder(path: str) -> Path:
    """Where the files of a model are, which `path` names by its folder or its hub id. Raises UserError where they are
    not on this machine."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: neither a folder nor a model of the local hub cache: {error}") from None


def digest_of_model(path: str) -> str:
    """`RULE` and a SHA-256 of a model's configuration, and of names, sizes and contents of the files of its weights.

    Weights beyond `_WHOLE_BYTES` are sampled: the beginning of each tensor, then every `_STEP_BYTES`. A change of a
    whole matrix, as by a merged adapter, shows wherever it is; one of a few numbers between two samples does not.

    Raises UserError as `local_folder`.
    """
    folder, digest = local_folder(path), hashlib.sha256()
    with reading("model.path", folder, "a model's folder that can be read"):
        for file in _matching(folder, _DESCRIPTIONS):
            digest.update(f"\n{file.name}\n".encode() + file.read_bytes())
        weights = [(file, file.stat().st_size) for file in _matching(folder, _WEIGHTS)]
        reads_all = sum(size for _, size in weights) <= _WHOLE_BYTES
        for file, size in weights:
            digest.update(f"\n{file.name} {size}\n".encode())
            if reads_all:
                with file.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
            else:
                for part in _samples(file, size):
                    digest.update(part)
    return RULE + digest.hexdigest()


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(file for pattern in patterns for file in folder.glob(pattern))


def _samples(file: Path, size: int) -> Iterator[bytes]:
    """What stands for the contents of a file: its list of tensors, and parts at positions that follow from that."""
    starts = {0}
    if file.suffix == ".safetensors":
        try:
            tensors = read_header(file)
        except BadSafetensors:
            tensors = {}  # it cannot be loaded; whoever tries says why
        starts |= {tensor.offset for tensor in tensors.values()}
        yield repr([(name, *tensor[1:]) for name, tensor in tensors.items()]).encode()
    elif zipfile.is_zipfile(file):  # torch.save writes one with a checksum of each tensor
        with zipfile.ZipFile(file) as archive:
            yield repr([(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]).encode()
    ordered = sorted(starts)
    with file.open("rb", buffering=0) as opened:
        for start, end in zip(ordered, [*ordered[1:], size], strict=True):
            for offset in range(start, end, _STEP_BYTES):
                opened.seek(offset)
                yield opened.read(_SAMPLE_BYTES)
