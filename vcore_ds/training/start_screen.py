"""Describe a run at its start: on the screen, and in detail in start.txt."""

import os
from collections.abc import Iterator, Sequence

import torch

from vcore_ds.common.text import count
from vcore_ds.config.data_section import DataConfig, WeightedPath
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.sections import LoraConfig, ModelConfig, ProbeConfig, UtilityConfig
from vcore_ds.data.dataset import Dataset, MainOrder, SubsetDataset, find_token_store
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.models.architecture_check import count_parameters
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import ParameterCounts, StepPasses
from vcore_ds.training.feed import Feed, count_dataset_tokens


def describe_model(model: ModelConfig, lora: LoraConfig | None, counts: ParameterCounts | None) -> str:
    """Describe the model, such as `Qwen/Qwen3-1.7B: 1,720,574,976 parameters, all trained, bf16`. `counts`: of the
    unsharded model; None to count them."""
    counts = counts or count_parameters(model.path, lora)
    kind = f"LoRA rank {lora.rank}" if lora is not None else "full-parameter"
    size = f"{counts.all:,} parameters, {counts.trained:,} trained ({kind})" if counts.all else kind
    return f"{shorten_path(model.path)}: {size}, {model.precision}"


def describe_training(data: DataConfig, dataset: Dataset) -> str:
    """Describe the training data, which may be several files."""
    return describe_data(" + ".join(shorten_path(file.path) for file in data.train_files()), dataset)


def describe_data(path: str, dataset: Dataset) -> str:
    """Describe data, such as `train.jsonl: 62 of 320 rows kept, 11,292 tokens (6,070 supervised); 258 dropped: ...`."""
    num_tokens, num_supervised = count_dataset_tokens(dataset)
    tokens = f"{num_tokens:,} tokens ({num_supervised:,} supervised), {dataset.lengths.max():,} in the longest"
    left_out: dict[str, int] = {}
    if isinstance(dataset, SubsetDataset):
        held_out = 0 if dataset.held_out is None else len(dataset.held_out)
        numbers = {"in data.probe_path too": dataset.num_trusted, "held out (data.validation_share)": held_out}
        left_out = {why: number for why, number in numbers.items() if number}
    dropped: dict[str, int] = {}
    if isinstance(dataset, SubsetDataset) and dataset.description:
        size = dataset.description
    else:
        num_rows, dropped = find_token_store(dataset).count_dropped_rows()
        is_partial = num_rows is not None and (dropped or left_out)
        size = f"{len(dataset):,} of {num_rows:,} rows kept" if is_partial else count(len(dataset), "sequence")
    reasons = [f"{number:,} dropped: {rule}" for rule, number in (dropped | left_out).items()]
    return "; ".join([f"{shorten_path(path)}: {size}, {tokens}", *reasons])


def describe_files(files: Sequence[WeightedPath], order: MainOrder, num_steps: int) -> Iterator[str]:
    """Yield a line for each of several training files: its share of a batch, sequences, and epochs in the run."""
    weights = order.shares.weights
    numbers = zip(files, weights, order.num_sequences, order.epochs(num_steps), strict=True)
    for file, weight, size, epochs in numbers:
        yield (
            f"{weight / sum(weights):.3g} of each batch from {shorten_path(file.path)}: {count(size, 'sequence')}, "
            + count(float(f"{epochs:.3g}"), "epoch")
        )


def describe_method(method: MethodConfig, utility: UtilityConfig, probe: ProbeConfig, probe_path: str | None) -> str:
    """Describe the method with its settings. `probe_path`: data.probe_path."""
    if not method.uses_utilities:
        return f"{method.title}, normalization {method.normalization}"
    is_budget = method.kl_budget is not None
    strength = f"KL budget {method.kl_budget:g} nats" if is_budget else f"temperature {method.temperature or 0:g}"
    if method.base_measure != "uniform":
        strength += f" from {method.base_measure}"
    if method.scope == "sequence_and_batch":
        strength += f", and {method.batch_kl_budget:g} nats over the sequences of a batch"
    how = "forward mode (jvp)" if utility.estimator == "jvp" else f"finite differences (epsilon {utility.epsilon})"
    source = f"probes of {probe.batch_size}"
    source += "" if probe_path is None else f" from {shorten_path(probe_path)}"
    source += ", weighted by probability" if probe.loss == "dft" else ""
    source += f", every {probe.every} steps" if probe.every > 1 else ""
    weights = f"VCORE token weights, {strength}" if method.name == "vcore" else method.title
    return f"{weights}, alpha {method.alpha}; utilities by {how} along the {probe.direction} direction ({source})"


def describe_cost(passes: StepPasses, shape: ModelShape, feed: Feed, probe_every: int) -> str:
    """Say what VCORE without trusted data costs, and what is expected of it."""
    length = round(float(feed.dataset.lengths.mean()))
    main = [length] * feed.plan.global_batch_size
    probe = [length] * (feed.plan.probe_batch_size_global or 0)
    training, without_probe = passes.flops(shape, main, [])
    _, extra = passes.flops(shape, main, probe)
    cost = 1 + (without_probe + (extra - without_probe) / probe_every) / training
    return (
        f"Cost:         {cost:.2g} times the FLOP of a step of methods/sft.yaml, over which no gain was measured "
        "without trusted data (data.probe_path): docs/scoring.md"
    )


def describe_parallelism() -> str:
    """Describe world size, ZeRO-3, tensor and expert parallelism."""
    world, tensor, expert = layout.size("job"), layout.size("tensor"), layout.size("expert")
    kind = torch.cuda.get_device_name() if device().type == "cuda" else "CPU"
    over = count(layout.size("shards"), "rank") if tensor == 1 else f"{layout.size('shards')} of {world} ranks"
    divided = f", expert parallelism {expert}" if expert > 1 else ""
    return f"ZeRO-3 over {over} ({kind}), tensor parallelism {tensor}{divided}"


def describe_accumulation(feed: Feed, num_done: int, num_steps: int) -> str:
    """Describe micro-batches per step and rank, and sequence-parallel sizes, of the next steps' main batches."""
    batches = feed.next_layouts(num_done, num_steps)
    numbers = [len(batch.micro_steps) for batch in batches]
    sizes = sorted({batch.sequence_parallel for batch in batches})
    often = f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"
    return f"gradient accumulation {often}, Ulysses sequence parallelism {' or '.join(map(str, sizes))}"


def shorten_path(path: str) -> str:
    """Make a path relative to the working directory if it is below it."""
    below = os.path.relpath(path) if os.path.isabs(path) else path
    return path if below.startswith("..") else below
