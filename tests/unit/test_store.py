"""The token store: sequences are read back, and a damaged or unsuitable store is reported before training."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.tokenizer import CHATML, make_tokenizer
from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import collate
from vcore_ds.data.dataset import keep_random_tokens
from vcore_ds.data.store import TokenStore, check_contents, check_supervision, describe_tokenizer, write_store
from vcore_ds.data.tokenization import TokenizedSequence


def make_sequences(num_sequences: int = 7, num_ids: int = 151_936) -> list[TokenizedSequence]:
    random = np.random.default_rng(3)
    sequences = []
    for i in range(num_sequences):
        length = int(random.integers(4, 30))
        supervised = np.arange(length) >= length // 2
        in_answer = np.arange(length) == length - 2
        ids = random.integers(0, num_ids, length).astype(np.int32)
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
    manifest = json.loads((store / "manifest.json").read_text())
    assert manifest["seed"] == 42
    assert manifest["num_tokens"] == sum(len(sequence) for sequence in expected)


def test_a_store_gives_batches_and_masks(store: Path) -> None:
    opened = TokenStore(store)
    batch, expected = (
        collate([opened[i] for i in range(3)], pad_token_id=0),
        collate(make_sequences()[:3], pad_token_id=0),
    )
    assert torch.equal(batch.input_ids, expected.input_ids) and torch.equal(batch.labels, expected.labels)
    kept = keep_random_tokens(opened, 0.5, seed=0)
    assert all((s.kept & s.in_answer).sum() == 1 for s in kept)
    assert (kept.lengths == opened.lengths).all() and len(kept) == 7


def test_the_same_input_gives_the_same_bytes(store: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "again", iter(make_sequences()), make_tokenizer(), seed=42)
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (store, tmp_path / "again")]
    assert len(contents[0]) == 7 and contents[0] == contents[1]


def test_megatron_core_itself_reads_the_tokens(store: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(store / "tokens"))
    assert [sequence.tolist() for sequence in dataset[0:7]] == [s.input_ids.tolist() for s in make_sequences()]
    marks = IndexedDataset(str(store / "marks"))
    assert [one.tolist() for one in marks[0:7]] == [(s.supervised + 2 * s.in_answer).tolist() for s in make_sequences()]


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
    before = describe_tokenizer(tokenizer)
    tokenizer("some text", truncation=True, max_length=3)
    assert describe_tokenizer(tokenizer) == before


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Overwrite bytes without changing the file's size; a negative offset counts from its end."""
    content_bytes = bytearray(path.read_bytes())
    begin = offset % len(content_bytes)
    content_bytes[begin : begin + len(content)] = content
    path.write_bytes(content_bytes)


LONG, SHORT = (np.int32(n).tobytes() for n in (10**6, 0))  # lengths, which begin at byte 34 of an index
BROKEN = {
    "truncated tokens": (
        lambda s: truncate(s / "tokens.bin", 4),
        ": damaged, or of different stores: found num_tokens",
    ),
    "truncated index": (lambda s: truncate(s / "tokens.idx", 130), ": damaged, or of different stores: found num_"),
    "truncated marks": (lambda s: truncate(s / "marks.bin", 1), ": damaged, or of different stores: found num_"),
    "longer file": (lambda s: (s / "marks.bin").write_bytes(b"0" * 999), ": damaged, or of different stores: "),
    "missing file": (lambda s: (s / "sequence_id.npy").unlink(), ": cannot be read ("),
    "no manifest": (lambda s: (s / "manifest.json").unlink(), ": found no manifest.json there"),
    "no folder": (shutil.rmtree, ": found no manifest.json there (working directory /"),
    "broken manifest": (lambda s: (s / "manifest.json").write_text("{"), "/manifest.json: is damaged"),
    "another manifest": (lambda s: (s / "manifest.json").write_text("[]"), "/manifest.json: is damaged"),
    "broken array": (lambda s: overwrite(s / "sequence_id.npy", 8, b"\x76\x00{'descr': ((("), ": cannot be read ("),
    "empty sequence, equal sums": (
        lambda s: overwrite(s / "tokens.idx", 34 + 2 * 4, np.array([0, 5 + 8], np.int32).tobytes()),
        ": damaged, or of different stores",
    ),
    "empty sequence": (lambda s: overwrite(s / "tokens.idx", 34, SHORT), ": damaged, or of different stores"),
    "longer sequence": (lambda s: overwrite(s / "tokens.idx", 34, LONG), ": damaged, or of different stores"),
    "another longest": (lambda s: change_manifest(s, max_length=30), ": damaged, or of different stores: found max_"),
    "another number of targets": (lambda s: change_manifest(s, num_supervised_tokens=3), ": damaged, or of different"),
    "fewer ids": (lambda s: np.save(s / "sequence_id.npy", np.arange(6)), ": damaged, or of different stores: found"),
    "other sums": (lambda s: change_manifest(s, num_tokens=7, num_supervised_tokens=3), ": damaged, or of different"),
}


@pytest.mark.parametrize(("breaks", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_store_is_refused(store: Path, breaks, reason: str) -> None:
    breaks(store)
    with pytest.raises(UserError) as error:
        TokenStore(store)
    assert str(error.value).startswith(f"{store}{reason}")


def change_manifest(store: Path, **changes: object) -> None:
    """`...` removes an entry."""
    manifest = json.loads((store / "manifest.json").read_text()) | changes
    kept = {key: value for key, value in manifest.items() if value is not ...}
    (store / "manifest.json").write_text(json.dumps(kept))


MANIFESTS = {
    "another format": dict(format="v9"),
    "sums that are a list": dict(sha256=[]),
    "sums without one": dict(sha256={"tokens.bin": "abc"}),
    "mistyped number": dict(num_sequences="7"),
    "mistyped tokenizer": dict(tokenizer={"name": "a", "hash": 3, "chat_template_hash": "b"}),
    "mistyped counts": dict(counts={"dropped": {"rule": "x"}}),
    "mistyped id": dict(max_token_id=[1]),
    "mistyped sums": dict(sha256="abc"),
    "of vcore_ds 0.7": dict(sha256=..., max_token_id=...),
}


@pytest.mark.parametrize("changes", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_damaged_manifest_is_refused(store: Path, changes: dict) -> None:
    change_manifest(store, **changes)
    with pytest.raises(UserError, match="manifest.json: "):
        TokenStore(store)


DAMAGES = {  # of an index: 34 bytes, then lengths (int32), places (int64), documents (int64)
    "token": ("tokens.bin", 8, b"\xff\xff\xff\x7f"),
    "mark": ("marks.bin", 3, b"\x02"),
    "sequence id": ("sequence_id.npy", 128, b"\x09"),
    "longer sequence": ("tokens.idx", 34, LONG),
    "empty sequence": ("tokens.idx", 34, SHORT),
    "place outside the file": ("tokens.idx", 34 + 7 * 4 + 8, np.int64(10**9).tobytes()),
    "place of another sequence": ("tokens.idx", 34 + 7 * 4, np.int64(4).tobytes()),
    "other type": ("tokens.idx", 17, b"\x05"),
    "unknown type": ("tokens.idx", 17, b"\xff"),
    "more sequences": ("tokens.idx", 18, np.uint64(10**15).tobytes()),
    "fewer sequences": ("tokens.idx", 18, np.uint64(3).tobytes()),
    "documents elsewhere": ("tokens.idx", -8, np.int64(3).tobytes()),
    "type of an array": ("sequence_id.npy", 22, b"f"),
}


@pytest.mark.parametrize(("name", "offset", "content"), DAMAGES.values(), ids=DAMAGES.keys())
def test_files_that_were_damaged_at_equal_size_are_refused(
    store: Path, tmp_path: Path, name: str, offset: int, content: bytes
) -> None:
    check_contents(store, tmp_path / "cache")
    overwrite(store / name, offset, content)
    with suppress(UserError):  # only the checksum finds all
        TokenStore(store)
    for _ in range(2):  # what failed is not remembered
        with pytest.raises(UserError, match=f"store/{name}: "):
            check_contents(store, tmp_path / "cache")


@pytest.mark.parametrize("name", ["tokens", "marks"])
def test_files_exchanged_with_those_of_another_store_are_refused(store: Path, tmp_path: Path, name: str) -> None:
    """Both have sequences of the same lengths, in another order or with other tokens."""
    other_store = tmp_path / "other"
    write_store(other_store, make_sequences()[::-1], make_tokenizer())
    shutil.copyfile(other_store / f"{name}.bin", store / f"{name}.bin")
    with pytest.raises(UserError, match=f"store/{name}.bin: "):
        check_contents(store, tmp_path / "cache")


def test_contents_are_read_once(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vcore_ds.data import store as data_store

    read: list[str] = []
    hash_file = data_store._sha256
    monkeypatch.setattr(data_store, "_sha256", lambda path: (read.append(path.name), hash_file(path))[1])
    for num_read in (6, 6):
        check_contents(store, tmp_path / "cache")
        assert len(read) == len(set(read)) == num_read
    (store / "marks.bin").touch()
    (tmp_path / "file").touch()  # no place to remember
    for i, cache in enumerate((tmp_path / "cache", tmp_path / "file", tmp_path / "file"), start=2):
        check_contents(store, cache)
        assert len(read) == 6 * i


def test_a_manifest_of_another_store_is_refused(store: Path, tmp_path: Path) -> None:
    change_manifest(store, digest="0" * 64)
    with pytest.raises(UserError, match="manifest.json: "):
        check_contents(store, tmp_path / "cache")


def test_token_ids_beyond_the_models_vocabulary_are_refused(store: Path) -> None:
    largest = max(int(sequence.input_ids.max()) for sequence in make_sequences())
    TokenStore(store, vocabulary_size=largest + 1)
    with pytest.raises(UserError, match=f"found token ids up to {largest:,}, expected ids below {largest:,}"):
        TokenStore(store, vocabulary_size=largest)


@pytest.mark.parametrize(
    ("changes", "what"), [({"chat_template": CHATML + " "}, "chat template"), ({"merges": (("a", "n"),)}, "tokenizer")]
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


def test_a_store_is_read_and_written_without_megatron_core(store: Path, tmp_path: Path) -> None:
    code = (
        "import sys, vcore_ds.data.store as data\n"
        "from tests.helpers.tokenizer import make_tokenizer\n"
        f"data.write_store({str(tmp_path / 'again')!r}, data.TokenStore({str(store)!r}), make_tokenizer(), seed=42)\n"
        "print(any(name.startswith('megatron') for name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert TokenStore(tmp_path / "again").digest == TokenStore(store).digest


def test_malformed_rows_are_in_the_counts(tmp_path: Path) -> None:
    counts = {"rows": 10, "malformed": 2, "dropped": {"a rule": 1}}
    write_store(tmp_path / "of two", make_sequences(), make_tokenizer(), first_rows=[("a", 0), ("b", 10)])
    names, numbers = TokenStore(tmp_path / "of two").origins()
    assert "".join(names) == "aaabbbb" and numbers.tolist() == [1, 4, 7, 0, 3, 6, 9]
    write_store(tmp_path / "store", make_sequences(), make_tokenizer(), counts=counts)
    store = TokenStore(tmp_path / "store")
    assert store.origins()[0] == [str(tmp_path / "store")] * 7
    assert store.origins()[1].tolist() == store.sequence_ids.tolist() == [1, 4, 7, 10, 13, 16, 19]
    check_supervision(tmp_path / "store", "last")  # of other than conversations there is one turn
    num_rows, dropped = store.count_dropped_rows()
    assert num_rows == len(store) + sum(dropped.values()) == 10
    assert dropped == {"malformed": 2, "a rule": 1} and "\n1 dropped: a rule" in store.describe()
