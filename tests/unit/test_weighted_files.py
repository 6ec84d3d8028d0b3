"""Several training files with weights, and trusted traces in the training data: order, reading and messages."""

import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoConfig

from tests.helpers.recipes import smallest_recipe
from tests.helpers.setups import sums, write_conversations, write_model
from vcore_ds.commands.cli import main
from vcore_ds.common.errors import UserError
from vcore_ds.common.random_streams import Stream
from vcore_ds.config.data_section import DataConfig, WeightedPath
from vcore_ds.config.load import dump_recipe, read_resolved_recipe
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.schema import Recipe, differing_keys
from vcore_ds.config.sections import ProbeConfig, RunConfig
from vcore_ds.data.cache import find_or_make_store
from vcore_ds.data.dataset import (
    Dataset,
    JoinedDataset,
    JoinedStores,
    MainOrder,
    RandomDraws,
    Shares,
    SubsetDataset,
    hold_out,
    list_files,
    shuffle_by_share,
    write_reference,
)
from vcore_ds.data.scores_folder import LOSS_WEIGHTS, TokenRows, write_token_table
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.training.faults import describe_rows
from vcore_ds.training.feed import DataReader, build_feed
from vcore_ds.training.followed import choose_traces
from vcore_ds.training.start_screen import describe_files, describe_training


def test_which_file_each_draw_comes_from_by_hand() -> None:
    # 2 : 1. Of t draws, 2t/3 rounded come from the first file: 0 1 1 2 3 3 4.
    assert [Shares([2, 1]).locate(t) for t in range(6)] == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    # 1 : 1 : 2 is (1 : 1) : 2. The halves alternate, and the first half's draws alternate between its files.
    assert [Shares([1, 1, 2]).locate(t)[0] for t in range(8)] == [0, 2, 1, 2, 0, 2, 1, 2]
    # 4 : 1 : 1 : 2 is 4 : ((1 : 1) : 2), so every second draw is one of those above.
    assert [Shares([4, 1, 1, 2]).locate(t)[0] for t in range(8)] == [0, 1, 0, 3, 0, 2, 0, 3]


def test_weights_are_decimals_and_only_their_ratios_count() -> None:
    assert Shares([0.7, 0.3]).weights == Shares([70, 30]).weights == [7, 3]
    assert Shares([0.1, 0.2]).weights == [1, 2]  # in binary, 0.2 / 0.1 is exact and 0.3 / 0.1 is not
    assert Shares([0.1, 0.3]).weights == [1, 3]
    assert Shares([1e-5, 1.0]).weights == [1, 100_000]


def test_every_window_has_the_shares_within_three_draws() -> None:
    random = np.random.default_rng(0)
    for num_files in (2, 3, 5, 9):
        weights = random.integers(1, 50, num_files).tolist()
        shares, exact = Shares(weights), np.array(weights) / sum(weights)
        counts = np.zeros(num_files, dtype=int)
        deviations = [np.zeros(num_files)]
        for t in range(4 * sum(weights)):
            file, earlier = shares.locate(t)
            assert earlier == counts[file]
            counts[file] += 1
            assert shares.count(t + 1) == counts.tolist()
            deviations.append(counts - (t + 1) * exact)
        assert np.abs(deviations).max() <= 1.5
        assert counts.tolist() == [4 * weight for weight in weights]
        windows = [np.abs(late - early).max() for early, late in pairwise(deviations[::64])]
        assert max(windows) <= 3


def test_a_mixed_order_takes_each_file_in_its_own_epochs_and_needs_no_state() -> None:
    order = MainOrder([5, 3], 4, 42, [3, 1])
    positions = [i for k in range(20) for i in order.step(k)]
    assert [MainOrder([5, 3], 4, 42, [3, 1]).step(k) for k in (19, 0, 7)] == [order.step(k) for k in (19, 0, 7)]
    assert all(sum(i >= 5 for i in order.step(k)) == 1 for k in range(20))
    # The first file alone, in the same seed: 60 draws, 12 epochs.
    alone = MainOrder([5], 1, 42)
    assert [i for i in positions if i < 5] == [alone.step(k)[0] for k in range(60)]
    second = [i - 5 for i in positions if i >= 5]
    epochs = [second[start : start + 3] for start in range(0, 18, 3)]
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) > 1
    assert order.epochs(20) == [12, pytest.approx(20 / 3)]
    # The size of a batch changes nothing, and a file's order does not depend on its weight.
    assert [i for k in range(10) for i in MainOrder([5, 3], 8, 42, [3, 1]).step(k)] == positions
    assert [i for k in range(60) for i in MainOrder([5, 3], 1, 42, [1, 1]).step(k) if i >= 5][:20] == [
        i + 5 for i in second
    ]


def test_the_order_of_several_files_does_not_change_between_versions() -> None:
    # A resumed run continues in this order: a change here breaks the runs of others.
    assert MainOrder([8, 8], 8, 42, [1, 1]).step(0) == [6, 13, 1, 9, 0, 11, 2, 12]


def test_random_draws_have_the_shares_of_the_main_batches() -> None:
    def draw(size: int, k: int) -> list[int]:
        return RandomDraws([50, 400], size, 42, Stream.PROBE, [9, 1]).step(k)

    for k in range(20):  # a batch that the shares divide has them exactly, of different sequences
        assert len(set(draw(40, k))) == 40 and sum(i < 50 for i in draw(40, k)) == 36
        assert len(draw(4, k)) == 4 and sum(i < 50 for i in draw(4, k)) >= 3
    ids = [i for k in range(4000) for i in draw(4, k)]
    # At most one of four from the rare file: the standard error of its share is below 0.25 * 0.5 / sqrt(4000).
    assert np.mean([i >= 50 for i in ids]) == pytest.approx(0.1, abs=0.006)
    assert np.mean([i >= 50 for k in range(0, 8000, 2) for i in draw(1, k)]) == pytest.approx(0.1, abs=0.015)
    assert set(ids) >= set(range(50)) and len(set(ids)) > 400
    # With one file the weight changes nothing.
    assert RandomDraws([9], 4, 1, Stream.PROBE, [0.3]).step(5) == RandomDraws([9], 4, 1, Stream.PROBE).step(5)


def test_a_shuffle_by_share_has_each_position_once_and_the_shares_at_its_start() -> None:
    order = shuffle_by_share([50, 400], [9, 1], np.random.default_rng(0)).tolist()
    assert sorted(order) == list(range(450))
    assert [n for n in range(50) if order[n] >= 50] == [5, 15, 25, 35, 45]  # one in the middle of each ten
    assert (
        shuffle_by_share([7], [0.3], np.random.default_rng(0)).tolist()
        == np.random.default_rng(0).permutation(7).tolist()
    )


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, files of conversations, and a prepared store."""
    folder = tmp_path_factory.mktemp("files")
    write_model(folder / "model")
    write_conversations(folder / "a.jsonl", sums(range(6)))
    write_conversations(folder / "b.jsonl", sums(range(10, 14)))
    write_conversations(folder / "trusted.jsonl", sums([3, 12, 99, 18]))  # the last is as long as 13
    find_or_make_store(
        str(folder / "b.jsonl"),
        load_tokenizer(str(folder / "model")),
        DataConfig(train_path="b.jsonl", cutoff_length=256, cache_dir=str(folder)),
        say=lambda _: None,
    ).rename(folder / "store")
    return folder


@pytest.fixture
def one_rank() -> None:
    start_process_group(timeout_minutes=1)  # the one of an earlier test of this process, where there is one


def make_reader(setup: Path, **data: object) -> DataReader:
    config = DataConfig.model_validate({"cutoff_length": 256, "cache_dir": str(setup / "cache"), **data})
    return DataReader(config, str(setup / "model"), load_tokenizer(str(setup / "model")))


def list_weighted(setup: Path, **weights: float) -> list[dict]:
    names = {"a": "a.jsonl", "b": "b.jsonl", "store": "store"}
    return [{"path": str(setup / names[name]), "weight": weight} for name, weight in weights.items()]


SFT = MethodConfig(name="sft")


def read_data(setup: Path, **data: object) -> Dataset:
    """The training data of a recipe's section `data`."""
    return make_reader(setup, **data).read_training_data(SFT, 0)


def test_sequences_that_are_named_twice_are_said(
    setup: Path, one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    make_reader(setup, train_path=list_weighted(setup, a=3, b=1)).read_training_stores()
    assert "same sequences" not in capsys.readouterr().out
    make_reader(setup, train_path=list_weighted(setup, a=3, b=1, store=1)).read_training_stores()
    assert f"{setup / 'store'} has the same sequences as {setup / 'b.jsonl'}" in capsys.readouterr().out


def test_conversations_and_stores_are_read_one_after_another(setup: Path, one_rank: None) -> None:
    reader = make_reader(setup, train_path=list_weighted(setup, a=3, store=1))
    data = reader.read_training_data(SFT, 0)
    assert isinstance(data, JoinedStores) and len(data) == 10
    parts = [reader.read_store(str(setup / name)) for name in ("a.jsonl", "store")]
    assert data.lengths.tolist() == [len(sequence) for part in parts for sequence in part]
    assert [sequence.sequence_id for sequence in data] == data.sequence_ids.tolist() == list(range(10))
    assert all(np.array_equal(data[i].input_ids, parts[i // 6][i % 6].input_ids) for i in range(10))
    names, rows = data.origins()
    assert [Path(name).name for name in names] == ["a.jsonl"] * 6 + ["b.jsonl"] * 4
    assert rows.tolist() == [*range(6), *range(4)]
    assert [Path(source["file"]).name for source in data.manifest["source"]] == ["a.jsonl", "b.jsonl"]
    assert data.manifest["num_supervised_tokens"] == sum(sequence.supervised.sum() for sequence in data)
    with_pool = JoinedDataset([SubsetDataset(data, np.array([0, 9])), reader.read_store(str(setup / "trusted.jsonl"))])
    described = [Path(text).name for text in describe_rows(with_pool, [0, 9, 12])]
    assert described == ["a.jsonl, row 1", "b.jsonl, row 4", "trusted.jsonl, row 3"]
    # Converted or prepared, in one order or the other.
    raw = read_data(setup, train_path=list_weighted(setup, a=1, b=1))
    swapped = read_data(setup, train_path=list_weighted(setup, b=1, a=3))
    assert data.digest == raw.digest != swapped.digest
    assert describe_training(reader.settings, data).startswith(
        f"{setup}/a.jsonl + {setup}/store: 10 sequences, {data.lengths.sum():,} tokens ("
    )


def test_a_share_of_each_file_is_held_out(setup: Path, one_rank: None) -> None:
    """Of 6 and 4 sequences 2 and 1; one file has the trusted traces."""
    train_path = list_weighted(setup, a=3, store=1)

    def split(seed: int, **data: object) -> tuple[set[int], set[int]]:
        reader = make_reader(setup, train_path=train_path, validation_share=0.3, **data)
        training = reader.read_training_data(SFT, seed)
        (held_out,) = reader.read_validation(training).values()
        assert f"{len(held_out)} dropped: held out" in describe_training(reader.settings, training)
        return set(training.sequence_ids.tolist()), set(held_out.sequence_ids.tolist())

    splits = [split(seed) for seed in (0, 1, 0)]
    for trained, held_out in splits:
        assert trained | held_out == set(range(10)) and not trained & held_out
        assert [sum(i < 6 for i in held_out), sum(i >= 6 for i in held_out)] == [2, 1]
    assert splits[0] == splits[2] != splits[1]
    data = read_data(setup, train_path=train_path)
    for share, numbers in ((0.01, [1, 1]), (0.99, [5, 3])):  # at least one of each file, and not all
        assert np.bincount(hold_out(data, share, 0) >= 6).tolist() == numbers
    _, held_out = splits[0]
    (setup / "pool.jsonl").write_text((setup / "b.jsonl").read_text())  # the file of the store, all of it
    trained, without_pool = split(0, probe_path=str(setup / "pool.jsonl"))
    assert without_pool == {i for i in held_out if i < 6} and trained == set(range(6)) - held_out
    with pytest.raises(UserError, match=r"data.validation_share: .*found 4 sequences, and none to hold out"):
        read_data(setup, train_path=str(setup / "b.jsonl"), probe_path=str(setup / "b.jsonl"), validation_share=0.5)


def test_a_run_warns_of_rows_that_are_left_out(setup: Path, one_rank: None, tmp_path: Path, capsys) -> None:
    (path := tmp_path / "train.jsonl").write_text("{broken\n" + (setup / "a.jsonl").read_text())
    make_reader(setup, train_path=str(path), max_malformed=0.5).read_store(str(path))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: "))
    assert f"{path}: 1 malformed rows are left out" in line


def test_one_file_in_a_list_is_that_file(setup: Path, one_rank: None) -> None:
    plain, listed = (
        read_data(setup, train_path=train) for train in (str(setup / "a.jsonl"), list_weighted(setup, a=0.3))
    )
    assert type(plain) is type(listed) and plain.digest == listed.digest
    assert MainOrder([6], 4, 7, [0.3]).step(5) == MainOrder([6], 4, 7).step(5)


def make_feed(data, method: MethodConfig = SFT, num_probe: int = 4):
    plan = SimpleNamespace(num_trusted_global=0, global_batch_size=4, probe_batch_size_global=num_probe)
    return build_feed(method, ProbeConfig(), plan, data, 0, seed=42)  # type: ignore[arg-type]


def test_probes_and_followed_traces_have_the_weights_of_their_files(setup: Path, one_rank: None) -> None:
    """Files of 6 and 4 sequences with weights 1:9, also where a trace of each is left out."""
    train = list_weighted(setup, a=1, b=9)
    for pool in ({}, {"probe_path": str(setup / "trusted.jsonl")}):
        data = read_data(setup, train_path=train, **pool)
        num_first = 5 if pool else 6
        feed = make_feed(data, MethodConfig(name="vcore"), num_probe=20)
        for k in range(3):
            assert sum(i < num_first for i in feed.probe_stream.step(k)) == 2
        followed = choose_traces(RunConfig(output_dir="x", num_followed_traces=4), DataConfig(train_path="x"), SFT,
                                 data, {})  # fmt: skip
        assert sum(sequence_id < 6 for (_, sequence_id), _ in followed) <= 1 and len(followed) == 4


def test_the_weights_are_part_of_the_digest_of_the_training_data(setup: Path, one_rank: None) -> None:
    digests = [
        make_feed(read_data(setup, train_path=list_weighted(setup, **weights))).training_digest()
        for weights in ({"a": 3, "b": 1}, {"a": 1.5, "b": 0.5}, {"a": 1, "b": 1}, {"a": 3}, {"a": 1})
    ]
    assert digests[0] == digests[1] != digests[2] and digests[3] == digests[4]
    feed = make_feed(read_data(setup, train_path=list_weighted(setup, a=3, b=1)))
    assert (feed.epoch(5), feed.main_order.epochs(4)) == (2.0, [2.0, 1.0])
    assert list(describe_files(make_reader(setup, train_path=list_weighted(setup, a=3, b=1)).settings.train_files(),
                               feed.main_order, 4)) == [
        f"0.75 of each batch from {setup}/a.jsonl: 6 sequences, 2 epochs",
        f"0.25 of each batch from {setup}/b.jsonl: 4 sequences, 1 epoch",
    ]  # fmt: skip


def test_trusted_traces_are_left_out_of_the_training_data(setup: Path, one_rank: None, capsys) -> None:
    pool, train = str(setup / "trusted.jsonl"), list_weighted(setup, a=1, store=1)
    data = read_data(setup, train_path=train, probe_path=pool)
    assert isinstance(data, SubsetDataset)
    assert data.positions.tolist() == [0, 1, 2, 4, 5, 6, 7, 9]  # without 3 of a.jsonl and 12, the third of b.jsonl
    assert [positions.tolist() for _, positions in list_files(data)] == [[0, 1, 2, 4, 5], [0, 1, 3]]
    described = describe_training(DataConfig(train_path="x"), data)
    num_supervised = sum(sequence.supervised.sum() for sequence in data)
    assert f"8 of 10 rows kept, {sum(map(len, data)):,} tokens ({num_supervised:,} supervised)" in described
    assert described.endswith("; 2 dropped: in data.probe_path too")
    kept = read_data(setup, train_path=train, probe_path=pool, trusted_overlap="keep")
    assert isinstance(kept, JoinedStores)
    assert "2 of the training traces are in data.probe_path too, and stay" in capsys.readouterr().out
    # Without any of them the data set is what it is without a pool.
    (file,) = list_weighted(setup, b=1)
    apart = read_data(setup, train_path=file["path"], probe_path=str(setup / "a.jsonl"))
    assert apart.digest == read_data(setup, train_path=file["path"]).digest
    same = make_reader(setup, train_path=file["path"], probe_path=file["path"])
    with pytest.raises(UserError, match=r"found all of its 4 traces in data.probe_path too; .* to keep to train on"):
        same.read_training_data(SFT, 0)


def test_a_method_gets_its_masks_and_its_weights(setup: Path, one_rank: None, tmp_path: Path) -> None:
    train = str(setup / "a.jsonl")
    reader, random = make_reader(setup, train_path=train), MethodConfig(name="random", keep_share=0.3)
    data, other = (reader.read_training_data(random, seed) for seed in (0, 1))
    assert all(one.kept is not None and 0 < one.kept.sum() <= one.supervised.sum() for one in data)
    assert any((one.kept != another.kept).any() for one, another in zip(data, other, strict=True))
    write_reference(tmp_path / "reference", data, log_probabilities := [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], model="m")
    data = read_data(setup, train_path=train, reference_log_probabilities=str(tmp_path / "reference"))
    assert [one.reference_log_probability for one in data] == log_probabilities
    store = make_reader(setup, train_path=train).read_store(train)
    tokenizer, offsets = store.manifest["tokenizer"], np.cumsum([0, *store.lengths[:5]])
    made_with = {
        "tokenizer": tokenizer["hash"],
        "chat_template": tokenizer["chat_template_hash"],
        "digest": store.digest,
    }
    weights = np.arange(offsets[-1], dtype=np.float16)
    write_token_table(
        path := tmp_path / "w", [TokenRows(np.arange(5), {LOSS_WEIGHTS: offsets}, {LOSS_WEIGHTS: weights})], made_with
    )
    with pytest.raises(UserError, match="found no weights for 1 of 6 training traces, first for the one at position 5"):
        read_data(setup, train_path=train, token_weights=str(path))
    write_conversations(tmp_path / "pool.jsonl", sums([5]))
    data = read_data(setup, train_path=train, token_weights=str(path), probe_path=str(tmp_path / "pool.jsonl"))
    assert [one.loss_weights.tolist() for one in data] == [weights[a:b].tolist() for a, b in pairwise(offsets)]
    assert data.digest != read_data(setup, train_path=train, probe_path=str(tmp_path / "pool.jsonl")).digest


def test_padding_is_a_token_of_the_model(setup: Path) -> None:
    size = AutoConfig.from_pretrained(setup / "model").vocab_size
    for token_id, expected in ((None, 0), (7, 7), (size - 1, size - 1), (size, 0)):
        tokenizer = SimpleNamespace(pad_token_id=token_id)
        assert DataReader(DataConfig(train_path="a"), str(setup / "model"), tokenizer).pad_token_id == expected


def test_a_damaged_store_is_not_trained_on(setup: Path, one_rank: None, tmp_path: Path) -> None:
    shutil.copytree(setup / "store", store := tmp_path / "store")
    tokens = np.fromfile(store / "tokens.bin", np.int32)
    tokens[5] ^= 1
    tokens.tofile(store / "tokens.bin")
    with pytest.raises(UserError, match="tokens.bin: "):
        read_data(setup, train_path=str(store))


def test_a_run_counts_the_rows_that_are_too_long(setup: Path, one_rank: None) -> None:
    train = str(setup / "a.jsonl")
    lengths = read_data(setup, train_path=train).lengths
    longest, cutoff = int(lengths.max()), int(lengths.max()) - 1
    num_kept = int((lengths <= cutoff).sum())

    def say(cutoff: int) -> str:
        settings = make_reader(setup, train_path=train, cutoff_length=cutoff).settings
        return describe_training(settings, read_data(setup, train_path=train, cutoff_length=cutoff))

    assert say(longest).endswith(f"supervised), {longest} in the longest") and 0 < num_kept < len(lengths)
    assert say(cutoff).endswith(f"; {len(lengths) - num_kept} dropped: longer than {cutoff} tokens")
    assert f"{num_kept} of {len(lengths)} rows kept" in say(cutoff)
    # Of several files all together; unknown where one does not tell.
    joined = make_reader(setup, train_path=list_weighted(setup, a=1, b=1), cutoff_length=cutoff).read_training_stores()
    assert joined.count_dropped_rows() == (10, {f"longer than {cutoff} tokens": 10 - len(joined)})
    joined.parts[0].manifest["counts"].pop("rows")
    assert joined.count_dropped_rows()[0] is None


def test_a_file_without_remaining_traces_is_refused(setup: Path, one_rank: None) -> None:
    pool, train = str(setup / "b.jsonl"), list_weighted(setup, a=1, b=1)
    data = read_data(setup, train_path=train, probe_path=pool)
    with pytest.raises(UserError, match=r"found no trace left of file 2 of the list .* Remove the file"):
        make_feed(data)


def test_a_recipe_may_list_files_with_weights(tmp_path: Path, capsys) -> None:
    data = {"train_path": [{"path": "~/a.jsonl", "weight": 2}, {"path": "b", "weight": 0.5}]}
    recipe = Recipe.model_validate(smallest_recipe() | {"data": data})
    assert recipe.data.train_files() == (
        WeightedPath(path=str(Path("~/a.jsonl").expanduser()), weight=2.0),
        WeightedPath(path="b", weight=0.5),
    )
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    again = read_resolved_recipe(tmp_path / "recipe.yaml")
    assert again == recipe and not differing_keys(again, recipe)
    assert list(recipe.data.paths()) == ["train_path[0]", "train_path[1]"]
    for wrong in ("[a.jsonl]", "[]", "[{path: a}]", "[{path: a, weight: 0}]", "[{path: a, weight: 1, share: 2}]"):
        assert main(["check", "launch_scripts/recipes/quickstart.yaml", f"data.train_path={wrong}"]) == 2
        message = capsys.readouterr().err
        assert "expected text or a list of {path: text, weight: a number above 0}" in message, message
