"""From a recipe's data files to the micro-batches of every step, on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .config import BatchPlan, Recipe
from .data import (
    Batch,
    Dataset,
    MainOrder,
    ProbeStream,
    collate,
    idle_batch,
    keep_random_tokens,
    pack,
    pack_batch,
    read_conversations,
    split_batch,
    tokenize_conversations,
    with_reference,
)
from .engine import distributed
from .models import attention_length
from .step import StepBatches
from .track.console import Console


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
    """Tokens of a sequence whose attention costs as much as its linear layers; weighs the rows of a packed batch."""

    def step(self, k: int) -> StepBatches:
        """Batches of optimizer step k, from 0."""
        main = self.batches(self.main_order.step(k), self.plan.micro_batch_size_per_rank)
        if self.probe_stream is None or k % self.probe_every != 0:
            return StepBatches(main, probe=[])
        ids, micro = self.probe_stream.step(k), self.plan.probe_micro_batch_size_per_rank
        return StepBatches(main, self.batches(ids, micro, self.probe_dataset))

    def batches(self, ids: Sequence[int], micro_batch_size: int, dataset: Dataset | None = None) -> list[Batch]:
        """This rank's micro-batches of the global batch `ids`, as many as every other rank has.

        Args:
            ids: positions in `dataset`, which is the training data unless another is given.
        """
        sequences = (dataset or self.dataset).sequences
        lengths = [len(sequences[i]) for i in ids]
        if self.plan.packed_row_tokens is not None:
            rows = pack_batch(
                ids,
                lengths,
                rank=distributed.rank(),
                data_parallel_size=self.plan.data_parallel_size,
                row_tokens=self.plan.packed_row_tokens,
                attention_length=self.attention_length,
            )
            return [
                pack([[sequences[i] for i in row]], self.pad_token_id) if row else idle_batch(self.pad_token_id)
                for row in rows
            ]
        split = split_batch(
            ids,
            lengths,
            rank=distributed.rank(),
            data_parallel_size=self.plan.data_parallel_size,
            micro_batch_size=micro_batch_size,
        )
        return [
            collate([sequences[i] for i in part], self.pad_token_id) if part else idle_batch(self.pad_token_id)
            for part in split
        ]


def read_training_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, console: Console) -> Dataset:
    """With what the recipe's method needs to know of each sequence."""
    is_random = recipe.method.name == "random"
    dataset = read_dataset(recipe, recipe.data.train_path, tokenizer, console, mark_answers=is_random)
    if is_random:
        return keep_random_tokens(dataset, recipe.method.keep_share, recipe.run.seed)
    if recipe.data.reference_log_probabilities is not None:
        return with_reference(dataset, recipe.data.reference_log_probabilities)
    return dataset


def read_dataset(
    recipe: Recipe, path: str, tokenizer: PreTrainedTokenizerBase, console: Console, *, mark_answers: bool = False
) -> Dataset:
    dataset = tokenize_conversations(
        read_conversations(path),
        tokenizer,
        cutoff_length=recipe.data.cutoff_length,
        overlong=recipe.data.overlong,
        mark_answers=mark_answers,
    )
    console.say(f"Data: {path}: {dataset.report.describe()}")
    return dataset


def build_feed(
    recipe: Recipe,
    plan: BatchPlan,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    probe_dataset: Dataset | None = None,
) -> Feed:
    """`probe_dataset`: what the probe batch is drawn from, None for the training data."""
    seed, of_probe = recipe.run.seed, probe_dataset or dataset
    probe_stream = None
    if recipe.method.name == "vcore":
        probe_stream = ProbeStream(len(of_probe.sequences), plan.probe_batch_size_global, seed)
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    main_order = MainOrder(len(dataset.sequences), plan.global_batch_size, seed)
    return Feed(
        dataset,
        plan,
        main_order,
        probe_stream,
        of_probe,
        pad_token_id,
        probe_every=recipe.probe.every,
        attention_length=attention_length(recipe.model.path) if plan.packed_row_tokens is not None else 0.0,
    )
