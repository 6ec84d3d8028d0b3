"""From a recipe's data files to the micro-batches of every step, on every rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from vcore_ds.config import BatchPlan, Recipe
from vcore_ds.data import (
    Batch,
    Dataset,
    MainOrder,
    ProbeStream,
    StepBatches,
    TokenStore,
    Waste,
    cache_root,
    check_contents,
    collate,
    idle_batch,
    keep_random_tokens,
    measure_waste,
    pack,
    pack_batch,
    split_batch,
    store_of,
    with_reference,
)
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import first_rank_first, local_rank
from vcore_ds.files.user_paths import reading
from vcore_ds.models import attention_length, vocabulary_size
from vcore_ds.track.console import Console


@dataclass(frozen=True)
class Feed:
    """From a step number to this rank's batches; the same sequences at any number of ranks."""

    dataset: Dataset
    plan: BatchPlan
    main_order: MainOrder
    probe_stream: ProbeStream | None
    probe_dataset: Dataset
    """What `probe_stream` draws from; the same as `dataset` unless the recipe names another."""
    pad_token_id: int
    probe_every: int
    """Optimizer steps that share one probe batch."""
    attention_length: float
    """Tokens of a sequence whose attention costs as much as its linear layers; weighs the rows of a batch."""

    def step(self, k: int) -> StepBatches:
        """Batches of optimizer step k, from 0."""
        layout, probe = self._main_layout(k), []
        if self.probe_stream is not None and k % self.probe_every == 0:
            ids, micro = self.probe_stream.step(k), self.plan.probe_micro_batch_size_per_rank
            probe = self.batches(ids, micro, self.probe_dataset)
        return StepBatches(self._of_rank(layout, self.dataset), probe, self._waste(layout))

    def batches(self, ids: Sequence[int], micro_batch_size: int, dataset: Dataset | None = None) -> list[Batch]:
        """This rank's micro-batches of the global batch `ids`, as many as every other rank has.

        Args:
            ids: positions in `dataset`, which is the training data unless another is given.
        """
        sequences = self.dataset if dataset is None else dataset
        return self._of_rank(self._layout(ids, micro_batch_size, sequences), sequences)

    def epoch(self, num_done: int) -> float:
        """Passes over the training data after `num_done` steps."""
        return num_done * self.plan.global_batch_size / len(self.dataset)

    def describe_waste(self, num_done: int, num_steps: int) -> str:
        """A line on the padding and waiting of the next steps, 50 at most."""
        steps = range(num_done, min(num_steps, num_done + 50)) or range(1)
        waste = self.waste(steps)
        return (
            f"Batches: {waste.padding_share:.2%} padding, slowest rank {waste.rank_imbalance:.3f} x mean "
            f"(main batches of steps {steps[0] + 1} to {steps[-1] + 1})"
        )

    def waste(self, steps: Iterable[int]) -> Waste:
        """Padding, and waiting for the slowest rank, of the main batches of some steps together."""
        return self._waste([micro_step for k in steps for micro_step in self._main_layout(k)])

    def _waste(self, micro_steps: Sequence[Sequence[Sequence[int]]]) -> Waste:
        lengths = {i: int(self.dataset.lengths[i]) for ranks in micro_steps for ids in ranks for i in ids}
        is_packed = self.plan.packed_row_tokens is not None
        return measure_waste(micro_steps, lengths, attention_length=self.attention_length, is_packed=is_packed)

    def _main_layout(self, k: int) -> list[list[list[int]]]:
        return self._layout(self.main_order.step(k), self.plan.micro_batch_size_per_rank, self.dataset)

    def _layout(self, ids: Sequence[int], micro_batch_size: int, dataset: Dataset) -> list[list[list[int]]]:
        """Positions in `dataset` by micro-step and rank."""
        lengths = [int(dataset.lengths[i]) for i in ids]
        ranks = self.plan.data_parallel_size
        if self.plan.packed_row_tokens is None:
            return split_batch(ids, lengths, data_parallel_size=ranks, micro_batch_size=micro_batch_size)
        return pack_batch(
            ids,
            lengths,
            data_parallel_size=ranks,
            row_tokens=self.plan.packed_row_tokens,
            attention_length=self.attention_length,
        )

    def _of_rank(self, micro_steps: Sequence[Sequence[Sequence[int]]], dataset: Dataset) -> list[Batch]:
        batches = []
        for ranks in micro_steps:
            sequences = [dataset[i] for i in ranks[layout.rank("data")]]
            if not sequences:
                batches.append(idle_batch(self.pad_token_id))
            elif self.plan.packed_row_tokens is not None:
                batches.append(pack([sequences], self.pad_token_id))
            else:
                batches.append(collate(sequences, self.pad_token_id))
        return batches


def read_training_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, console: Console) -> Dataset:
    """With what the recipe's method needs to know of each sequence."""
    dataset = read_dataset(recipe, recipe.data.train_path, tokenizer, console)
    if recipe.method.name == "random":
        return keep_random_tokens(dataset, recipe.method.keep_share, recipe.run.seed)
    if recipe.data.reference_log_probabilities is not None:
        return with_reference(dataset, recipe.data.reference_log_probabilities)
    return dataset


def read_dataset(recipe: Recipe, path: str, tokenizer: PreTrainedTokenizerBase, console: Console) -> TokenStore:
    """The token store at `path`, or that of the raw data there, made by one process before the others look.

    A collective. Raises UserError where it cannot be made, is damaged, or does not fit the model.
    """

    def find() -> Path:
        folder = store_of(
            path,
            tokenizer,
            cutoff_length=recipe.data.cutoff_length,
            overlong=recipe.data.overlong,
            cache_folder=recipe.data.cache_dir,
            say=console.say,
        )
        if local_rank() == 0:
            with reading("", folder, "a token store that can be read"):
                check_contents(folder, cache_root(recipe.data.cache_dir), console.say)
        return folder

    store = TokenStore(
        first_rank_first(find),
        tokenizer,
        cutoff_length=recipe.data.cutoff_length,
        vocabulary_size=vocabulary_size(recipe.model.path),
    )
    console.say(f"Data: {path}: {store.describe()}")
    return store


def build_feed(
    recipe: Recipe,
    plan: BatchPlan,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    probe_dataset: Dataset | None = None,
) -> Feed:
    """`probe_dataset`: what the probe batch is drawn from, None for the training data."""
    seed, of_probe = recipe.run.seed, dataset if probe_dataset is None else probe_dataset
    probe_stream = None
    if recipe.method.name == "vcore":
        probe_stream = ProbeStream(len(of_probe), plan.probe_batch_size_global, seed)
    pad_token_id = tokenizer.pad_token_id
    if pad_token_id is None or pad_token_id >= vocabulary_size(recipe.model.path):
        pad_token_id = 0  # any token of the model will do: no real token sees it, and no loss is taken there
    main_order = MainOrder(len(dataset), plan.global_batch_size, seed)
    return Feed(
        dataset,
        plan,
        main_order,
        probe_stream,
        of_probe,
        pad_token_id,
        probe_every=recipe.probe.every,
        attention_length=attention_length(recipe.model.path),
    )
