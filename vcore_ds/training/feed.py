"""The feed of a run: from data files to this rank's micro-batches of every step."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from vcore_ds.common.errors import Problems, UserError
from vcore_ds.common.paths import cache_root, compute_file_digest, is_readable, reading
from vcore_ds.common.random_streams import Stream
from vcore_ds.common.text import count
from vcore_ds.config.data_section import WRITTEN_BY_COMMANDS, DataConfig
from vcore_ds.config.exports import ADAPTER_WEIGHTS, CARD
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.sections import ProbeConfig
from vcore_ds.data.batches import Batch, StepBatches, collate, idle_batch, pack
from vcore_ds.data.cache import find_or_make_store, find_shared
from vcore_ds.data.dataset import (
    ChangedDataset,
    Dataset,
    JoinedDataset,
    JoinedStores,
    MainOrder,
    RandomDraws,
    Store,
    SubsetDataset,
    add_reference,
    find_token_store,
    hold_out,
    keep_random_tokens,
    list_files,
    list_shares,
)
from vcore_ds.data.prepare.sources import is_small
from vcore_ds.data.score_selection import Selection, StartingWeights, read_matching_selection
from vcore_ds.data.scores_folder import TokenWeights
from vcore_ds.data.store import TokenStore, check_contents
from vcore_ds.data.tokenization import TokenizedSequence, TokenizedSequences
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import local_rank
from vcore_ds.distributed.process_group import run_on_ranks_in_turn
from vcore_ds.models.description import read_model
from vcore_ds.models.model_identity import compute_model_digest, read_card_metadata
from vcore_ds.planning.batch_layout import BatchLayout, Utilization, summarize
from vcore_ds.planning.batch_plan import BatchKind, BatchPlan
from vcore_ds.training import console


@dataclass(frozen=True)
class Feed:
    """Maps a step number to this rank's batches; the sequences of a step are the same at any world size."""

    dataset: Dataset
    plan: BatchPlan
    main_order: MainOrder
    probe_stream: RandomDraws | None
    probe_dataset: Dataset  # the pool that `probe_stream` draws from; `dataset` unless the recipe names another
    trusted_stream: RandomDraws | None
    """Draws the part of each main batch that comes from `probe_dataset`; None for none."""
    main_dataset: Dataset | JoinedDataset  # the training data, followed by the pool where main batches draw from it
    pad_token_id: int
    probe_every: int  # optimizer steps that share one probe batch

    @property
    def first_trusted_id(self) -> int | None:
        """First sequence id of the pool in main batches; None if they do not draw from it."""
        main = self.main_dataset
        return main.first_ids[1] if isinstance(main, JoinedDataset) else None

    def step(self, k: int) -> StepBatches:
        """Make the batches of optimizer step k, from 0."""
        main, probe = self._lay_out_main(k), self._lay_out_probe(k)
        measured: dict[str, float | int | None] = {
            "padding_share": main.waste.padding_share,
            "rank_imbalance": main.waste.rank_imbalance,
            "sequence_parallel": main.sequence_parallel,
            "probe_rank_imbalance": None if probe is None else probe.waste.rank_imbalance,
            "probe_sequence_parallel": None if probe is None else probe.sequence_parallel,
        }
        return StepBatches(
            make_rank_batches(main, self.main_dataset, self.pad_token_id),
            [] if probe is None else make_rank_batches(probe, self.probe_dataset, self.pad_token_id),
            measured,
            _take_lengths(main.ids, self.main_dataset),
            [] if probe is None else _take_lengths(probe.ids, self.probe_dataset),
        )

    def batches(
        self, ids: Sequence[int], micro_batch_size: int | None, dataset: Dataset | JoinedDataset | None = None
    ) -> list[Batch]:
        """Make this rank's micro-batches of the global batch `ids`, positions in `dataset` (None for the training
        data); every rank has the same number. `micro_batch_size`: sequences per rank in one forward; None for that of
        the main batch."""
        sequences = self.dataset if dataset is None else dataset
        batch_layout = self.plan.lay_out_main(ids, _take_lengths(ids, sequences), micro_batch_size)
        return make_rank_batches(batch_layout, sequences, self.pad_token_id)

    def probe_batches(self, ids: Sequence[int]) -> list[Batch]:
        """Make this rank's micro-batches of the probe batch `ids`, positions in `probe_dataset`."""
        batch_layout = self.plan.lay_out_probe(ids, _take_lengths(ids, self.probe_dataset))
        return make_rank_batches(batch_layout, self.probe_dataset, self.pad_token_id)

    def epoch(self, num_done: int) -> float:
        """Passes over the training data after `num_done` steps: sequences drawn over sequences of all files."""
        return num_done * self.main_order.batch_size / len(self.dataset)

    def training_digest(self) -> str:
        """SHA-256 of the training sequences and of the weights of their files."""
        weights = self.main_order.shares.weights
        if len(weights) == 1:
            return self.dataset.digest
        return hashlib.sha256(f"{self.dataset.digest} {weights}".encode()).hexdigest()

    def utilization(self, num_done: int, num_steps: int) -> dict[BatchKind, Utilization]:
        """Measure how well the next steps, at most 50, use the ranks."""
        utilization: dict[BatchKind, Utilization] = {"main": summarize(self.next_layouts(num_done, num_steps))}
        probes = [probe for k in _next_steps(num_done, num_steps) if (probe := self._lay_out_probe(k)) is not None]
        return utilization | ({"probe": summarize(probes)} if probes else {})

    def next_layouts(self, num_done: int, num_steps: int) -> list[BatchLayout]:
        """Lay out the next main batches, at most 50."""
        return [self._lay_out_main(k) for k in _next_steps(num_done, num_steps)]

    def _lay_out_main(self, k: int) -> BatchLayout:
        ids = self.main_order.step(k)
        if self.trusted_stream is not None:
            ids += [len(self.dataset) + i for i in self.trusted_stream.step(k)]
        return self.plan.lay_out_main(ids, _take_lengths(ids, self.main_dataset))

    def _lay_out_probe(self, k: int) -> BatchLayout | None:
        """Lay out the probe batch of step k; None if it computes no direction."""
        if self.probe_stream is None or k % self.probe_every != 0:
            return None
        ids = self.probe_stream.step(k)
        return self.plan.lay_out_probe(ids, _take_lengths(ids, self.probe_dataset))


def _next_steps(num_done: int, num_steps: int) -> range:
    return range(num_done, min(num_steps, num_done + 50)) or range(1)


def make_rank_batches(
    batch_layout: BatchLayout, sequences: TokenizedSequences | Sequence[TokenizedSequence], pad_token_id: int
) -> list[Batch]:
    """Make this rank's micro-batches of a batch, whose ids are positions in `sequences`."""
    size, batches = batch_layout.sequence_parallel, []
    for ids in batch_layout.list_group_ids(layout.rank("data", size)):
        selected = [sequences[i] for i in ids]
        if not selected:
            batches.append(idle_batch(pad_token_id, size))
        elif batch_layout.is_packed:
            batches.append(pack([selected], pad_token_id, size))
        else:
            batches.append(collate(selected, pad_token_id, size))
    return batches


def _take_lengths(ids: Sequence[int], dataset: Dataset | JoinedDataset) -> list[int]:
    return [int(dataset.lengths[i]) for i in ids]


def identify_start(model: str, adapter: str | None = None) -> StartingWeights:
    """Identify the weights with which a run begins: `model.path`, `lora.adapter`. Raises UserError if the adapter
    cannot be read."""
    adapter_digest = None
    if adapter is not None:
        with reading("lora.adapter", Path(adapter), "a trained adapter"):
            adapter_digest = compute_file_digest(Path(adapter, ADAPTER_WEIGHTS))
    checkpoint = read_card_metadata(Path(adapter or model, CARD)).get("checkpoint")
    return StartingWeights(model, compute_model_digest(model), adapter, adapter_digest, checkpoint)


@dataclass(frozen=True)
class DataReader:
    """Opens token stores, making missing ones. The methods are collectives."""

    settings: DataConfig
    model: str
    tokenizer: PreTrainedTokenizerBase
    adapter: str | None = None  # lora.adapter, for the check of scores
    _stores: dict[str, TokenStore] = field(default_factory=dict, init=False)

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding id, or 0 if the model does not have it: no real token attends to padding."""
        token_id = self.tokenizer.pad_token_id
        return 0 if token_id is None or token_id >= read_model(self.model).vocabulary_size else token_id

    def read_training_data(self, method: MethodConfig, seed: int) -> Dataset:
        """Read the kept sequences of data.train_path, with the masks, log-probabilities or weights that the method
        needs. `seed`: of the run."""
        store = self.read_training_stores()
        dataset: Dataset = store
        if method.drops_tokens:
            dataset = keep_random_tokens(store, method.keep_share, seed)
        elif self.settings.reference_log_probabilities is not None:
            dataset = add_reference(store, self.settings.reference_log_probabilities)
        weights = None
        if self.settings.token_weights is not None:
            weights = TokenWeights(Path(self.settings.token_weights), store)
            dataset = ChangedDataset(store, weights.add_to, weights.digest)
        kept = self._select(store)
        positions = np.arange(len(store)) if kept is None else kept.positions
        held_out = self._hold_out(store, seed)
        trained = positions if held_out is None else np.setdiff1d(positions, held_out)
        remaining = self._drop_trusted(store, trained)
        if weights is not None:
            weights.check_has(remaining)
        if kept is None and len(remaining) == len(store):
            return dataset
        return SubsetDataset(
            dataset,
            remaining,
            description="" if kept is None else kept.describe(),
            origin=None if kept is None else kept.origin(),
            num_trusted=len(trained) - len(remaining),
            held_out=held_out,
        )

    def read_validation(self, training: Dataset) -> dict[str, Dataset]:
        """Read the held-out sets by name: those of data.validation_path, or the sequences that `training`, of
        `read_training_data`, leaves out."""
        if isinstance(training, SubsetDataset) and training.held_out is not None:
            return {"": SubsetDataset(find_token_store(training), training.held_out)}
        return {name: self.read_store(path) for name, path in self.settings.validation_paths().items()}

    def _hold_out(self, store: Store, seed: int) -> np.ndarray | None:
        """Draw the positions that `data.validation_share` holds out, without those of trusted traces; None without
        it."""
        settings = self.settings
        if settings.validation_share is None:
            return None
        held_out = hold_out(store, settings.validation_share, seed)
        if settings.probe_path is not None:  # the probe's gradient would know them
            held_out = np.setdiff1d(held_out, find_shared(store, self.read_store(settings.probe_path)))
        if not len(held_out):
            raise UserError(
                f"data.validation_share: {settings.train_name()}: found {count(len(store), 'sequence')}, and none to "
                "hold out that is not in data.probe_path; expected more. Name held-out data in data.validation_path"
            )
        return held_out

    def _select(self, store: Store) -> Selection | None:
        """Select traces by `data.keep`; None without it."""
        if (keep := self.settings.keep) is None:
            return None
        start = run_on_ranks_in_turn(lambda: identify_start(self.model, self.adapter))
        kept = run_on_ranks_in_turn(lambda: read_matching_selection(keep, store, start))
        # Nodes may have copies of the scores. From different ones, ranks would draw different batches unnoticed.
        if len(set(layout.gather_objects("job", kept.digest))) > 1:
            raise UserError(
                f"data.keep.scores: {keep.scores}: found different scores on different nodes; expected the same. Name "
                "a folder that all nodes share, or copy it to all of them"
            )
        for name, (num_kept, num_scored) in kept.counts_by_source.items():
            console.note(f"Kept of {name}: {num_kept:,} of {num_scored:,} traces")
        return kept

    def _drop_trusted(self, store: Store, positions: np.ndarray) -> np.ndarray:
        """Return the positions without those of trusted traces, unless the recipe keeps them."""
        settings = self.settings
        if settings.probe_path is None:
            return positions
        is_trusted = np.isin(positions, find_shared(store, self.read_store(settings.probe_path)))
        number = int(is_trusted.sum())
        if settings.trusted_overlap == "keep":
            if number:
                console.say(
                    f"Data: {number:,} of the training traces are in data.probe_path too, and stay "
                    "(data.trusted_overlap: keep)"
                )
            return positions
        if number == len(positions):
            raise UserError(
                f"data.train_path: {settings.train_name()}: found all of its {number:,} traces in data.probe_path too; "
                "expected others to train on. Set data.trusted_overlap to keep to train on the trusted traces"
            )
        return positions[~is_trusted]

    def read_training_stores(self) -> Store:
        """Open the token store of data.train_path; of several files, their stores joined."""
        files = self.settings.train_files()
        stores = [self.read_store(file.path) for file in files]
        if len(stores) == 1:
            return stores[0]
        joined = JoinedStores(stores, [file.weight for file in files])
        digests = [store.digest for store in stores]
        for i, digest in enumerate(digests):
            if (first := digests.index(digest)) < i:
                console.warn(
                    f"data.train_path: {files[i].path} has the same sequences as {files[first].path}; they count twice"
                )
        for file, first in zip(files, joined.first_ids, strict=True):
            console.note(f"Sequence ids of {file.path}: from {first:,}")
        return joined

    def read_stores(self, paths: Iterable[str]) -> None:
        """Open the token stores of all paths. Raises one UserError for all that cannot be used."""
        problems = Problems()
        for path in paths:
            with problems.collect():
                self.read_store(path)
        problems.raise_all()

    def read_store(self, path: str) -> TokenStore:
        """Open the token store at `path`, or one that a single process makes of the raw data there. Raises UserError if
        it cannot be made, is damaged, or does not fit the model."""
        if path in self._stores:
            return self._stores[path]
        settings = self.settings

        def find_store() -> Path:
            folder = find_or_make_store(path, self.tokenizer, settings, say=console.say, note=console.note)
            if local_rank() == 0:
                check_contents(folder, cache_root(settings.cache_dir))
            return folder

        store = open_store(settings, run_on_ranks_in_turn(find_store), self.model, self.tokenizer)
        console.note(f"Data: {path}: {store.describe()}")
        for what, number in store.manifest.get("counts", {}).get("noticed", {}).items():
            console.warn(f"{path}: {number:,} {what}")
        self._stores[path] = store
        return store


def open_store(settings: DataConfig, folder: Path, model: str, tokenizer: PreTrainedTokenizerBase) -> TokenStore:
    """Open a token store. Raises UserError if it is damaged, or does not fit the model."""
    length, size = settings.cutoff_length, read_model(model).vocabulary_size
    return TokenStore(folder, tokenizer, cutoff_length=length, vocabulary_size=size)


def check_local_data(settings: DataConfig, model: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Open the data of a recipe that are on this machine as a run does, and return the token store of each path. Those
    of large raw data are left to the run. Raises its UserErrors."""
    problems, stores = Problems(), dict[str, str]()
    for key, path in settings.paths().items():
        if key in WRITTEN_BY_COMMANDS or not is_readable(path):
            continue
        with problems.collect():
            if not is_small(path, settings.split):
                continue
            folder = find_or_make_store(path, tokenizer, settings, say=lambda _: None)
            check_contents(folder, cache_root(settings.cache_dir))
            open_store(settings, folder, model, tokenizer)
            stores[path] = str(folder)
    problems.raise_all()
    return stores


def count_dataset_tokens(dataset: Dataset) -> tuple[int, int]:
    """Count tokens and supervised tokens of a data set."""
    files = list_files(dataset)
    num_tokens = sum(int(store.lengths[positions].sum()) for store, positions in files)
    return num_tokens, sum(int(store.num_supervised_tokens[positions].sum()) for store, positions in files)


def build_feed(
    method: MethodConfig,
    probe: ProbeConfig,
    plan: BatchPlan,
    dataset: Dataset,
    pad_token_id: int,
    *,
    seed: int,
    probe_dataset: Dataset | None = None,
) -> Feed:
    """Build the feed. `probe_dataset`: source of probe batches and of the trusted part of main batches; None for the
    training data."""
    sizes, weights = list_shares(dataset)
    if 0 in sizes:
        raise UserError(
            f"data.train_path: found no trace left of file {sizes.index(0) + 1} of the list (data.keep and "
            "data.trusted_overlap leave traces out); expected at least one of each file. Remove the file from the list"
        )
    num_trusted = plan.num_trusted_global
    probe_source = dataset if probe_dataset is None else probe_dataset
    probe_sizes, probe_weights = list_shares(probe_source)
    probe_stream = trusted_stream = None
    if method.uses_utilities:
        size = len(probe_source) if plan.probe_batch_size_global is None else plan.probe_batch_size_global
        probe_stream = RandomDraws(probe_sizes, size, seed, Stream.PROBE, probe_weights)
    if num_trusted:
        trusted_stream = RandomDraws(probe_sizes, num_trusted, seed, Stream.TRUSTED, probe_weights)
    main_order = MainOrder(sizes, plan.global_batch_size - num_trusted, seed, weights)
    return Feed(
        dataset,
        plan,
        main_order,
        probe_stream,
        probe_source,
        trusted_stream,
        JoinedDataset([dataset, probe_source]) if num_trusted else dataset,
        pad_token_id,
        probe_every=probe.every,
    )
