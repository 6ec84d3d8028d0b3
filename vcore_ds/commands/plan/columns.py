"""The columns of a plan: the recipe next to plain fine-tuning, or next to other settings; and what local data and a
measured run tell a plan."""

import argparse
import shlex
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vcore_ds.commands.plan.prediction import (
    LengthModel,
    RunPlan,
    find_model,
    find_smallest_cluster,
    plan_run,
    require_gpu,
)
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import is_readable
from vcore_ds.common.text import GIB
from vcore_ds.config.data_section import MANIFEST, DataConfig
from vcore_ds.config.load import load_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import RunConfig
from vcore_ds.planning.hardware import Achieved, Cluster, Gpu, find_gpu
from vcore_ds.planning.known_models import find_folder, find_shape, is_on_disk
from vcore_ds.planning.settings import PlanSettings, derive_plan_settings
from vcore_ds.training.run_folder import ENVIRONMENT, METRICS, read_environment, read_run_metrics, read_run_recipe
from vcore_ds.training.schedule import derive_schedule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GPU_OPTIONS = {
    "gpu_memory": ("memory_bytes", GIB, "GIB", "usable memory of a GPU, GiB"),
    "tflops": ("flops", 1e12, "N", "dense bf16 TFLOP/s of the data sheet"),
    "bandwidth": ("memory_bandwidth", 1e12, "TB/S", "memory bandwidth, TB/s"),
    "nvlink": ("node_bandwidth", 1e9, "GB/S", "bandwidth between GPUs of a node, GB/s per direction"),
    "nic": ("network_bandwidth", 1e9 / 8, "GBIT/S", "network bandwidth per GPU, Gbit/s"),
}
"""Option -> field of `Gpu` and its unit, metavar, help."""

NUM_WARM_UP = 2  # number of first steps that are left out: they compile kernels and make connections

_SMALLEST_SHARE, _LARGEST_SHARE = 1e-4, 1.0


def calibrate(run: str) -> tuple[Achieved, str]:
    """The shares of a GPU's peak with which the plan of a run's recipe and cluster reproduces its metrics: the phases
    with matrix multiplications give that of compute, the update that of memory; and a line on them. Raises UserError
    for a folder without a run, a run that is too short, or a device of unknown peak."""
    folder = Path(run)
    try:
        recipe, environment, steps = read_run_recipe(folder), read_environment(folder), read_run_metrics(folder)
    except UserError as error:
        raise UserError(f"--calibrate: {str(error).removeprefix('RUN: ')}") from None
    lines: list[dict[str, Any]] = steps[NUM_WARM_UP:]
    try:
        device, num_gpus = str(environment["devices"][0]), int(environment["world_size"])
        mean_tokens = statistics.median(line["supervised_tokens"] / line["sequences"] for line in lines)
        update = statistics.median(line["seconds_step"] for line in lines)
        measured = statistics.median(
            sum(line[f"seconds_{phase}"] for phase in ("probe", "utility", "main")) for line in lines
        )
    except (LookupError, TypeError, ValueError):  # without steps too
        raise UserError(
            f"--calibrate: {folder}: found an incomplete run; expected devices and world_size in {ENVIRONMENT}, and "
            f"more than {NUM_WARM_UP} steps with tokens and seconds in {METRICS}"
        ) from None
    if (gpu := find_gpu(device)) is None:
        raise UserError(
            f"--calibrate: {folder / ENVIRONMENT}: found devices {device}; expected GPUs whose peak is known, because "
            "the shares of other devices say nothing about a GPU"
        )
    shape, _ = find_model(recipe.model.path)
    cluster = Cluster(gpu, num_gpus, len(environment["devices"]))
    plan = plan_run(derive_plan_settings(recipe), cluster, shape, lengths=LengthModel(mean_tokens))
    achieved = Achieved()
    if update > 0:
        share = achieved.memory * plan.cost.seconds["step"] / update
        achieved = replace(achieved, memory=min(max(share, _SMALLEST_SHARE), _LARGEST_SHARE))
    # Seconds fall as the share of compute rises.
    low, high = _SMALLEST_SHARE, _LARGEST_SHARE
    for _ in range(24):
        middle = (low * high) ** 0.5
        cost = plan.estimate_cost(with_share(achieved, middle))
        low, high = (middle, high) if cost.seconds_step - cost.seconds["step"] > measured else (low, middle)
    achieved = with_share(achieved, high)
    return achieved, (
        f"Calibrated on {run}: {len(lines)} steps on {device}, median {measured + update:.3g} s; matrix "
        f"multiplications reach {achieved.compute:.0%} of the peak, the update {achieved.memory:.0%} of the memory "
        "bandwidth; everything else as assumed"
    )


def with_share(achieved: Achieved, share: float) -> Achieved:
    """Another share of compute, with attention faster or slower by the same factor."""
    return replace(achieved, compute=share, attention=share / Achieved().compute)


_MAX_ROWS = 256  # rows of raw data that are tokenized, which takes a second or two

_MAX_LENGTHS = 4096  # lengths of a token store that are kept


def find_lengths(
    data: DataConfig,
    model_path: str,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    stores: Mapping[str, str] = MappingProxyType({}),
) -> LengthModel:
    """Sample the lengths of data.train_path and data.probe_path; those of typical reasoning traces if the training data
    are not on this machine, have no sequence within data.cutoff_length, or are raw data and the model's tokenizer is
    not here. `tokenizer`: the model's, if it is loaded; `stores`: path of raw data -> its token store, where it has
    been made. Raises UserError for a damaged token store or an unreadable file."""
    files = data.train_files()
    if not all(is_readable(file.path) for file in files):
        return LengthModel()
    tokenizer = find_tokenizer(model_path, tokenizer)

    def read(path: str) -> tuple[list[int], int | None]:
        return _read(stores.get(path, path), data, tokenizer)

    samples, totals = zip(*(read(file.path) for file in files), strict=True)
    if not all(samples):
        return LengthModel()
    num_read, sum_weights = sum(map(len, samples)), sum(file.weight for file in files)
    lengths: list[int] = []
    for sample, file in zip(samples, files, strict=True):
        number = max(1, round(min(num_read, _MAX_LENGTHS) * file.weight / sum_weights))
        # Evenly spaced; some several times if there are fewer.
        lengths += [sample[i * len(sample) // number] for i in range(number)]
    num_sequences = None if None in totals else sum(total or 0 for total in totals)
    probe: list[int] = []
    if data.probe_path is not None and is_readable(data.probe_path):
        probe, _ = read(data.probe_path)
    which = f"the {num_sequences:,}" if num_sequences is not None else f"the first {num_read:,}"
    mean = sum(lengths) / len(lengths)
    source = f"{which} sequences of {data.train_name()}, mean {mean:,.0f} tokens, longest {max(lengths):,}"
    num_held_out = None
    if data.validation_share is not None and num_sequences is not None:
        num_held_out = round(data.validation_share * num_sequences)
        num_sequences -= num_held_out
    elif data.validation_path is not None and all(map(is_readable, data.validation_paths().values())):
        totals = tuple(read(path)[1] for path in data.validation_paths().values())
        num_held_out = None if None in totals else sum(total or 0 for total in totals)
    return LengthModel(mean, tuple(lengths), tuple(probe), num_sequences, source, num_held_out)


def _read(path: str, data: DataConfig, tokenizer: "PreTrainedTokenizerBase | None") -> tuple[list[int], int | None]:
    """Read lengths, none of raw data without a tokenizer, and the total number of sequences; None if not all were
    read: of raw data the first rows of each file are."""
    # Import numpy and transformers: seconds.
    from vcore_ds.data.conversations import render_conversation
    from vcore_ds.data.messages import Malformed
    from vcore_ds.data.prepare.rows import read_chat_rows
    from vcore_ds.data.prepare.sources import find_files
    from vcore_ds.data.store import TokenStore
    from vcore_ds.data.tokenization import tokenize_rendered

    if (Path(path) / MANIFEST).is_file():
        lengths = TokenStore(path).lengths.tolist()
        return lengths, len(lengths)
    if tokenizer is None:
        return [], None
    files, rendered = find_files([path], data.split), []
    max_rows, is_all = max(1, _MAX_ROWS // len(files)), len(files) <= _MAX_ROWS
    for file in files[:_MAX_ROWS]:
        rows = list(islice(read_chat_rows(file, data.columns), max_rows + 1))
        is_all = is_all and len(rows) <= max_rows
        for conversation in rows[:max_rows]:
            with suppress(Malformed):  # refused by the template; the run reports it
                rendered.append(render_conversation(conversation, tokenizer))
    lengths = [len(sequence) for sequence in tokenize_rendered(rendered, tokenizer)] if rendered else []
    if data.overlong == "drop":
        lengths = [n for n in lengths if n <= data.cutoff_length]
    return [min(n, data.cutoff_length) for n in lengths], len(lengths) if is_all else None


def find_tokenizer(
    model_path: str, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer of a model on this machine, unless it is given; None if there is none that renders
    conversations, which a run reports."""
    folder = find_folder(model_path)
    if tokenizer is None and folder is None:
        return None
    from vcore_ds.data.conversations import check_tokenizer  # imports transformers: seconds
    from vcore_ds.data.tokenization import load_tokenizer

    try:
        tokenizer = load_tokenizer(str(folder)) if tokenizer is None else tokenizer
        check_tokenizer(tokenizer)
    except UserError:
        return None
    return tokenizer


def count_sequences(data: DataConfig, lengths: LengthModel) -> int | None:
    """The number of training sequences, those that data.keep selects; None if it is not known here."""
    if data.keep is None:
        return lengths.num_sequences
    from vcore_ds.data.score_selection import read_selection  # imports numpy

    return len(read_selection(data.keep).positions) if is_readable(data.keep.scores) else None


def with_num_steps(recipe: Recipe, lengths: LengthModel) -> PlanSettings:
    """The plan's settings, with the steps of `schedule.num_epochs` where the number of training sequences is known."""
    settings = derive_plan_settings(recipe)
    if settings.num_steps is not None or (num_sequences := count_sequences(recipe.data, lengths)) is None:
        return settings
    per_step = settings.batch.global_size - settings.num_trusted
    schedule = derive_schedule(recipe.schedule, recipe.optimizer.learning_rate, num_sequences, per_step)
    return replace(settings, num_steps=schedule.num_steps)


_KL_BUDGET = 0.005  # nats, for the `vcore` column of a recipe with another method; no cost depends on it
RARER_PROBE = "probe.every=8"  # of the column beside a recipe with a probe in every step


@dataclass(frozen=True)
class Column:
    """The plan of one setting, and the fewest GPUs for it."""

    title: str
    plan: RunPlan
    smallest: RunPlan | None  # the plan on the fewest GPUs on which the run fits; None if there are too many


@dataclass(frozen=True)
class PlanTable:
    """The content of a plan's table."""

    recipe_name: str
    model: str
    columns: list[Column]
    speeds: str  # where the speeds are from
    recipe_plan: RunPlan
    must_fit: bool  # `engine.memory_check`: whether a run that does not fit is refused
    validation: str | None  # the cost of the held-out losses; None without them


def build_table(arguments: argparse.Namespace) -> PlanTable:
    """Plan each column. Raises UserError for a recipe, GPU, model or run that cannot be used."""

    def reload(extra: Sequence[str]) -> Recipe:
        return load_recipe(arguments.recipe, [*arguments.overrides, *extra])

    recipe = reload(())
    if is_on_disk(recipe.model.path):
        from vcore_ds.models.architecture_check import check_configuration  # imports torch and transformers: seconds

        check_configuration(derive_plan_settings(recipe))
    gpu = choose_gpu(arguments)
    shape, model = find_model(recipe.model.path)
    achieved, speeds = Achieved(), "No speed was measured: --calibrate RUN takes a run's"
    if arguments.calibrate is not None:
        achieved, speeds = calibrate(arguments.calibrate)
    cluster = Cluster(gpu, arguments.gpus, arguments.gpus_per_node, achieved)

    def plan_column(title: str, recipe: Recipe) -> Column:
        column_shape, _ = find_shape(recipe.model.path) or (shape, model)
        lengths = (
            find_lengths(recipe.data, recipe.model.path)
            if arguments.mean_tokens is None
            else LengthModel(arguments.mean_tokens)
        )
        plan = plan_run(with_num_steps(recipe, lengths), cluster, column_shape, lengths=lengths)
        return Column(title, plan, find_smallest_cluster(plan))

    if arguments.compare:
        recipe_title = "recipe"
        recipes = {"recipe": recipe} | {setting: reload(split_setting(setting)) for setting in arguments.compare}
    else:
        recipe_title = recipe.method.name
        recipes = {name: change_method(recipe, name) for name in ("sft", recipe_title, "vcore")}
        if recipe.probe.every == 1:
            recipes[f"vcore {RARER_PROBE}"] = change_method(reload([RARER_PROBE]), "vcore")
    columns = {title: plan_column(title, changed) for title, changed in recipes.items()}
    plan = columns[recipe_title].plan
    validation = describe_validation(recipe.run, plan) if recipe.data.has_held_out else None
    must_fit = recipe.engine.memory_check
    return PlanTable(arguments.recipe, model, [*columns.values()], speeds, plan, must_fit, validation)


def describe_validation(run: RunConfig, plan: RunPlan) -> str:
    """Describe how often the held-out loss is measured, and what it costs."""
    num_steps, num_held_out = plan.costed_steps, plan.lengths.num_held_out
    num_sequences = num_held_out or 1000
    times = 1 + sum(run.validates(step, num_steps) for step in range(1, num_steps + 1))
    seconds = plan.seconds_forward * num_sequences / plan.settings.batch.global_size
    share = times * seconds / (times * seconds + num_steps * plan.cost.seconds_step)
    text = f"Held-out loss: {times} times (run.validate_every), {seconds:,.3g} s each for {num_sequences:,} sequences"
    return f"{text}, {share:.1%} of the run" if num_held_out else text


def change_method(recipe: Recipe, name: str) -> Recipe:
    """The recipe with another method, and no other change."""
    if recipe.method.name == name:
        return recipe
    strength = {"temperature": None, "kl_budget": _KL_BUDGET if name == "vcore" else None}
    return recipe.model_copy(update={"method": recipe.method.model_copy(update={"name": name, **strength})})


def split_setting(setting: str) -> list[str]:
    """Split a setting of --compare into overrides. Raises UserError for unbalanced quotes."""
    try:
        return shlex.split(setting)
    except ValueError as error:
        raise UserError(f"--compare: found {setting!r}: {error}; expected overrides in balanced quotes") from None


def choose_gpu(arguments: argparse.Namespace) -> Gpu:
    """The GPU of `--gpu`, with the values of the options that replace some. Raises UserError for an unknown name."""
    gpu = require_gpu(arguments.gpu)
    given = {option: value for option in GPU_OPTIONS if (value := getattr(arguments, option)) is not None}
    if not given:
        return gpu
    changed = {GPU_OPTIONS[option][0]: value * GPU_OPTIONS[option][1] for option, value in given.items()}
    if "flops" in changed:
        changed["attention_flops"] = gpu.attention_flops * changed["flops"] / gpu.flops
    return replace(gpu, name=f"{gpu.name} (changed)", **changed)
