"""The token store: sequences are read back, and a damaged or unsuitable store is reported before training."""

import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.tokenizer import CHATML, make_tokenizer
from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import collate
from vcore_ds.data.dataset import keep_random_tokens
from vcore_ds.data.store import TokenStore, hash_tokenizer, write_store
from vcore_ds.data.store_checks import check_contents
from vcore_ds.data.tokenization import TokenizedSequence


def make_sequences(num_sequences: int = 7) -> list[TokenizedSequence]:
    random = np.random.default_rng(3)
    sequences = []
    for i in range(num_sequences):
        length = int(random.integers(4, 30))
        supervised = np.arange(length) >= length // 2
        in_answer = np.arange(length) == length - 2
        ids = random.integers(0, 151_936, length).astype(np.int32)
        sequences.append(TokenizedSequence(3 * i + 1, ids, supervised, in_answer))
    return sequences


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", make_sequences(), make_tokenizer(), seed=42)
    return tmp_path / "store"


def test_stored_sequences_are_read_back(store: Path) -> None:
    opened, expected = TokenStore(store, make_tokenizer(), cutoff_length=30), make_sequences()
    assert len(opened) == 7
    assert opened.lengths.tolist() == [len(sequence) for sequence in expected]
    assert opened.num_supervised_tokens.tolist() == [sequence.supervised.sum() for sequence in expected]
    for stored, sequence in zip(opened, expected, strict=True):
        assert stored.sequence_id == sequence.sequence_id
        np.testing.assert_array_equal(stored.input_ids, sequence.input_ids)
        np.testing.assert_array_equal(stored.supervised, sequence.supervised)
        np.testing.assert_array_equal(stored.in_answer, sequence.in_answer)
        assert stored.input_ids.dtype == np.int32 and stored.supervised.dtype == np.bool_
    assert [sequence.sequence_id for sequence in opened[-2:]] == [16, 19]
    assert opened[-1].sequence_id == 19
    with pytest.raises(IndexError):
        opened[7]
    manifest = json.loads((store / "manifest.json").read_text())
    assert manifest["seed"] == 42
    assert manifest["num_tokens"] == sum(len(sequence) for sequence in expected)


def test_a_store_can_be_used_like_a_list_of_sequences(store: Path) -> None:
    opened = TokenStore(store)
    batch, expected = collate(opened[:3], pad_token_id=0), collate(make_sequences()[:3], pad_token_id=0)
    assert torch.equal(batch.input_ids, expected.input_ids) and torch.equal(batch.labels, expected.labels)
    kept = keep_random_tokens(opened, 0.5, seed=0)
    assert all((s.kept & s.in_answer).sum() == 1 for s in kept)
    assert (kept.lengths == opened.lengths).all() and len(kept[2:5]) == 3


def test_lengths_outlive_the_store(store: Path) -> None:
    lengths = TokenStore(store).lengths
    gc.collect()
    assert lengths.tolist() == [len(sequence.input_ids) for sequence in make_sequences()]


def test_the_same_input_gives_the_same_bytes(store: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "again", iter(make_sequences()), make_tokenizer(), seed=42)
    names = sorted(path.name for path in store.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert all((store / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_megatron_core_itself_reads_the_tokens(store: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(store / "tokens"))
    assert [sequence.tolist() for sequence in dataset[0:7]] == [s.input_ids.tolist() for s in make_sequences()]


def test_the_digest_covers_tokens_and_supervision(store: Path, tmp_path: Path) -> None:
    digest = TokenStore(store).digest

    def write_and_digest(change) -> str:
        sequences = make_sequences()
        change(sequences)
        folder = tmp_path / f"other{len(list(tmp_path.iterdir()))}"
        write_store(folder, sequences, make_tokenizer(), seed=43)
        return TokenStore(folder).digest

    def change_token(sequences):
        sequences[3].input_ids[-1] += 1

    def change_target(sequences):
        sequences[3].supervised[1] = True

    def move_border(sequences):  # the same tokens in the same order
        a, b = sequences[0], sequences[1]
        both = [np.concatenate([getattr(s, key) for s in (a, b)]) for key in ("input_ids", "supervised", "in_answer")]
        cut = len(a) + 1
        sequences[:2] = [
            TokenizedSequence(a.sequence_id, *(array[:cut] for array in both)),
            TokenizedSequence(b.sequence_id, *(array[cut:] for array in both)),
        ]

    assert write_and_digest(lambda sequences: None) == digest
    assert len({digest, *map(write_and_digest, (change_token, change_target, move_border))}) == 4


def test_a_tokenizers_settings_of_the_last_call_are_not_part_of_its_hash() -> None:
    tokenizer = make_tokenizer()
    before = hash_tokenizer(tokenizer)
    tokenizer("some text", truncation=True, max_length=3)
    assert hash_tokenizer(tokenizer) == before


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


BROKEN = {
    "truncated tokens": (lambda s: truncate(s / "tokens.bin", 4), "tokens.bin: truncated: found "),
    "truncated index": (lambda s: truncate(s / "tokens.idx", 1), "tokens.idx: truncated: found "),
    "truncated marks": (lambda s: truncate(s / "marks.bin", 1), "marks.bin: truncated: found "),
    "longer file": (lambda s: (s / "marks.bin").write_bytes(b"0" * 999), "not the file that was written: found 999"),
    "missing file": (lambda s: (s / "sequence_id.npy").unlink(), "sequence_id.npy: the file is missing"),
    "no manifest": (lambda s: (s / "manifest.json").unlink(), "found no manifest.json there, only marks.bin"),
    "no folder": (shutil.rmtree, "there is no such folder"),
    "broken manifest": (lambda s: (s / "manifest.json").write_text("{"), "not the manifest of a token store"),
    "another manifest": (lambda s: (s / "manifest.json").write_text("[]"), "not the manifest of a token store"),
    "another format": (lambda s: (s / "manifest.json").write_text('{"format": "v9"}'), "found the format 'v9'"),
    "broken index": (
        lambda s: (s / "marks.idx").write_bytes(b"x" * (s / "marks.idx").stat().st_size),
        "not an index of megatron-core's format",
    ),
}


@pytest.mark.parametrize(("breaks", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_store_is_refused(store: Path, breaks, reason: str) -> None:
    breaks(store)
    with pytest.raises(UserError) as error:
        TokenStore(store)
    assert str(error.value).startswith(str(store))
    assert reason in str(error.value)


def change_manifest(store: Path, **changes: object) -> None:
    """`...` removes an entry."""
    manifest = json.loads((store / "manifest.json").read_text()) | changes
    kept = {key: value for key, value in manifest.items() if value is not ...}
    (store / "manifest.json").write_text(json.dumps(kept))


MANIFESTS = {
    "no files": dict(files=...),
    "files that is a list": dict(files=[]),
    "files without one": dict(files={"tokens.bin": 3}),
    "mistyped number": dict(num_sequences="7"),
    "mistyped tokenizer": dict(tokenizer={"name": "a", "hash": 3, "chat_template_hash": "b"}),
    "mistyped counts": dict(counts={"dropped": {"rule": "x"}}),
    "mistyped id": dict(max_token_id=[1]),
    "mistyped sums": dict(sha256="abc"),
}


@pytest.mark.parametrize("changes", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_damaged_manifest_is_refused(store: Path, changes: dict) -> None:
    change_manifest(store, **changes)
    with pytest.raises(UserError, match="manifest.json: not the manifest of a token store"):
        TokenStore(store)


HEADER_BYTES = 34  # of an index, followed by lengths (int32), places (int64), documents (int64)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Overwrite bytes without changing the file's size; a negative offset counts from its end."""
    content_bytes = bytearray(path.read_bytes())
    begin = offset % len(content_bytes)
    content_bytes[begin : begin + len(content)] = content
    path.write_bytes(content_bytes)


def exchange(first: Path, second: Path) -> None:
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


INDICES = {
    "longer sequence": (
        HEADER_BYTES,
        np.int32(10**6).tobytes(),
        "found lengths of 5 to 1,000,000 tokens, expected 1 to",
    ),
    "empty sequence": (HEADER_BYTES, np.int32(0).tobytes(), "found lengths of 0 to "),
    "place outside the file": (HEADER_BYTES + 7 * 4 + 8, np.int64(10**9).tobytes(), "offsets that do not follow"),
    "place of another sequence": (HEADER_BYTES + 7 * 4, np.int64(4).tobytes(), "offsets that do not follow"),
    "other type": (
        17,
        b"\x05",
        "found version, type, sequences and documents .1, 5, 7, 8. in .* expected .1, 4, 7, 8.",
    ),
    "unknown type": (17, b"\xff", ".1, 255, 7, 8. in "),
    "more sequences": (18, np.uint64(10**15).tobytes(), "1000000000000000, 8. in"),
    "fewer sequences": (18, np.uint64(3).tobytes(), "1, 4, 3, 8. in "),
    "documents elsewhere": (-8, np.int64(3).tobytes(), "no readable index"),
}


@pytest.mark.parametrize(("offset", "content", "reason"), INDICES.values(), ids=INDICES.keys())
def test_an_index_that_was_damaged_at_equal_size_is_refused(store: Path, offset: int, content: bytes, reason: str):
    overwrite(store / "tokens.idx", offset, content)
    with pytest.raises(UserError, match=reason):
        TokenStore(store)


def test_arrays_exchanged_for_others_of_equal_size_are_refused(store: Path) -> None:
    path = store / "sequence_id.npy"
    np.save(path, np.load(path).astype(np.float64))
    with pytest.raises(UserError, match=r"sequence_id.npy: found an array of float64 \[7\], expected int64"):
        TokenStore(store)
    overwrite(path, 0, b"\x93NUMPY\x01\x00\x76\x00{'descr': (((")
    with pytest.raises(UserError, match="sequence_id.npy: not a readable array"):
        TokenStore(store)


CONTENTS = {
    "tokens.bin": lambda s: overwrite(s / "tokens.bin", 8, b"\xff\xff\xff\x7f"),
    "marks.bin": lambda s: overwrite(s / "marks.bin", 3, b"\x02"),
    "sequence_id.npy": lambda s: overwrite(s / "sequence_id.npy", 128, b"\x09"),
}


@pytest.mark.parametrize(("name", "damages"), CONTENTS.items())
def test_contents_that_were_damaged_at_equal_size_are_refused(store: Path, tmp_path: Path, name: str, damages) -> None:
    check_contents(store, tmp_path / "cache")
    damages(store)
    TokenStore(store)  # its structure is fine
    for _ in range(2):  # what failed is not remembered
        with pytest.raises(UserError, match=f"store/{name}: damaged, or of another store: its size is right"):
            check_contents(store, tmp_path / "cache")


@pytest.mark.parametrize("name", ["tokens", "marks"])
def test_files_exchanged_with_those_of_another_store_are_refused(store: Path, tmp_path: Path, name: str) -> None:
    """Both have sequences of the same lengths, in another order or with other tokens."""
    other_store = tmp_path / "other"
    write_store(other_store, make_sequences()[::-1], make_tokenizer())
    exchange(store / f"{name}.bin", other_store / f"{name}.bin")
    with pytest.raises(UserError, match=f"store/{name}.bin: damaged, or of another store"):
        check_contents(store, tmp_path / "cache")


def test_contents_are_read_once(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vcore_ds.data import store_checks

    read: list[str] = []
    hash_file = store_checks._sha256
    monkeypatch.setattr(store_checks, "_sha256", lambda path: (read.append(path.name), hash_file(path))[1])
    check_contents(store, tmp_path / "cache")
    assert len(read) == len(set(read)) == 6
    check_contents(store, tmp_path / "cache")
    assert len(read) == 6
    (store / "marks.bin").touch()
    check_contents(store, tmp_path / "cache")
    assert len(read) == 12


def test_without_a_place_to_remember_contents_are_read_each_time(store: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    said: list[str] = []
    for _ in range(2):
        check_contents(store, tmp_path / "cache", said.append)
    assert len(said) == 2 and "computes its checksums again" in said[0]


def test_stores_from_before_checksums_are_checked_by_their_digest(store: Path, tmp_path: Path) -> None:
    change_manifest(store, sha256=..., max_token_id=...)
    check_contents(store, tmp_path / "cache")
    overwrite(store / "tokens.bin", 8, b"\x00")
    with pytest.raises(UserError, match="their digest is not the one in manifest.json"):
        check_contents(store, tmp_path / "cache")


@pytest.mark.parametrize("changes", [{}, {"max_token_id": ...}], ids=["written", "counted"])
def test_token_ids_beyond_the_models_vocabulary_are_refused(store: Path, changes: dict) -> None:
    largest = max(int(sequence.input_ids.max()) for sequence in make_sequences())
    change_manifest(store, **changes)
    TokenStore(store, vocabulary_size=largest + 1)
    with pytest.raises(UserError, match=f"found token ids up to {largest:,}, expected ids below {largest:,}"):
        TokenStore(store, vocabulary_size=largest)


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"chat_template": CHATML + " "}, "chat template"), ({"merges": (("a", "n"),)}, "tokenizer")],
)
def test_a_store_of_another_tokenizer_or_template_is_refused(store: Path, changes: dict, what: str) -> None:
    with pytest.raises(UserError, match=f"found tokens of another {what} .*make it again with `vcore-ds prepare`"):
        TokenStore(store, make_tokenizer(**changes))


def test_a_store_of_longer_sequences_is_refused(store: Path) -> None:
    longest = max(len(sequence) for sequence in make_sequences())
    TokenStore(store, cutoff_length=longest)
    with pytest.raises(UserError, match=f"up to {longest} tokens, expected at most {longest - 1}"):
        TokenStore(store, cutoff_length=longest - 1)


def test_a_half_written_store_never_has_its_name(tmp_path: Path) -> None:
    bare = TokenizedSequence(5, np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.bool_))
    with pytest.raises(UserError, match="sequence 5 .3 tokens. has no supervised token"):
        write_store(tmp_path / "store", [*make_sequences(), bare], make_tokenizer())
    with pytest.raises(UserError, match="no sequence to store"):
        write_store(tmp_path / "store", [], make_tokenizer())
    assert not (tmp_path / "store").exists()
    write_store(tmp_path / "store", make_sequences(), make_tokenizer())
    with pytest.raises(UserError, match="is there already"):
        write_store(tmp_path / "store", make_sequences(), make_tokenizer())


def test_opening_a_store_warns_of_nothing_and_loads_megatron_core_only_then(store: Path) -> None:
    code = (
        "import sys, vcore_ds.data.store as data\n"
        "assert not any(name.startswith('megatron') for name in sys.modules)\n"
        f"store = data.TokenStore({str(store)!r})\n"
        "print(len(store), len(store[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == (f"7 {len(make_sequences()[0])}\n", "")


def test_malformed_rows_are_in_the_counts(tmp_path: Path) -> None:
    counts = {"rows": 10, "malformed": 2, "dropped": {"a rule": 1}}
    write_store(tmp_path / "store", make_sequences(), make_tokenizer(), counts=counts)
    store = TokenStore(tmp_path / "store")
    num_rows, dropped = store.count_dropped_rows()
    assert num_rows == len(store) + sum(dropped.values()) == 10
    assert "\n2 dropped: malformed\n" in store.describe()
