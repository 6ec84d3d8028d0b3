"""`vcore-ds check`: resolve and validate a recipe without a GPU."""

import argparse
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcore_ds.commands.arguments import add_recipe, positive
from vcore_ds.commands.plan import prediction
from vcore_ds.commands.plan.columns import count_sequences, find_lengths, find_tokenizer, with_num_steps
from vcore_ds.commands.plan.prediction import LengthModel, simulate, summarize_batches
from vcore_ds.common.errors import Problems, UserError
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.paths import is_readable
from vcore_ds.common.text import count
from vcore_ds.config.data_section import WRITTEN_BY_COMMANDS
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.batch_plan import BatchPlan, plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.fit import describe_memory, describe_shortage, plan_memory
from vcore_ds.planning.hardware import GPUS, Cluster
from vcore_ds.planning.known_models import find_or_assume_shape, find_shape, is_on_disk
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.run_folder import FinishedRun, can_resume, check_output_folder
from vcore_ds.training.schedule import warn_of_repeats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELP = "validate a recipe without a GPU"
DESCRIPTION = (
    "Resolve and validate a recipe, and say how its batch is divided among the ranks. Needs no GPU, model or data. "
    "A model and data on this machine are checked as a run checks them; token stores of small data are made in "
    "data.cache_dir, where the run finds them. Example: vcore-ds check qwen3_8b_math_lora.yaml batch.global_size=16 "
    "--ranks 8 --gpu H100"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_recipe(parser)
    add("--ranks", type=positive, metavar="N", help="number of ranks, one per GPU, in nodes of 8 (default: the fewest)")
    fit = "also estimate memory and time on GPUs of this kind, and fail if the run does not fit: "
    add("--gpu", metavar="NAME", help=fit + ", ".join(GPUS))
    shown = "print the recipe with all defaults instead (YAML that every command takes as a recipe)"
    add("--recipe", dest="prints_recipe", action="store_true", help=shown)


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError where training would refuse the recipe: batch arithmetic, a contradiction with the DeepSpeed
    JSON, the model's configuration, data on this machine, an output folder in use or not writable; and with --gpu if it
    does not fit."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    settings, warnings = derive_plan_settings(recipe), []
    problems = Problems()
    tokenizer: PreTrainedTokenizerBase | None = None
    with problems.collect():
        try:
            can_resume(recipe)
        except FinishedRun as error:
            warnings.append(f"Warning: {error}")
        check_output_folder(Path(recipe.run.output_dir))
    with problems.collect():
        tokenizer = check_model(recipe)
    problems.raise_all()
    num_ranks = arguments.ranks or recipe.parallel.tensor * recipe.parallel.expert
    plan = plan_batch(settings, num_ranks, find_or_assume_shape(recipe.model.path))
    ds_config = deepspeed_config(settings, plan)
    if arguments.prints_recipe:
        print(dump_recipe(recipe), end="")
        return
    stores: dict[str, str] = {}
    if tokenizer is not None:
        from vcore_ds.training.feed import check_local_data

        stores = check_local_data(recipe.data, recipe.model.path, tokenizer)
    renderer = find_tokenizer(recipe.model.path, tokenizer)
    lengths = find_lengths(recipe.data, recipe.model.path, renderer, stores)
    lines = [f"Valid: {arguments.recipe} on {count(num_ranks, 'rank')} (--recipe prints it with all defaults)"]
    if arguments.gpu is not None:
        lines.append(plan_on(arguments.gpu, recipe, num_ranks, lengths).describe())
    lines += [*warnings, f"Batch: {plan.describe()}", *describe_lengths(recipe, lengths)]
    lines += [*describe_ranks(recipe, plan, ds_config, lengths), *describe_rows(recipe, renderer, stores)]
    if recipe.data.probe_path is not None and recipe.data.keep is None:
        words = shlex.join(["vcore-ds", "score", arguments.recipe, *arguments.overrides])
        lines.append(
            f"Trusted data: {words} scores the training traces by them, and data.keep.scores with data.keep.top=0.25 "
            "selects the best; presets/trusted.yaml steers token weights (docs/scoring.md says which helps when)"
        )
    print("\n".join(lines))


def check_model(recipe: Recipe) -> "PreTrainedTokenizerBase | None":
    """Check the weighting function and a model on this machine as a run does, and return the model's tokenizer, if it
    is here. Raises their UserErrors."""
    if recipe.method.name == "custom":
        with lasting_imports():
            from vcore_ds.training.weighting import check_function  # imports torch: seconds

        check_function(recipe.method)
    if not is_on_disk(recipe.model.path):
        return None
    with lasting_imports():  # of torch, transformers and peft: seconds
        from vcore_ds.data.tokenization import load_tokenizer
        from vcore_ds.models.architecture_check import check_configuration, check_model_folder
        from vcore_ds.training.feed import check_local_data  # noqa: F401
        from vcore_ds.training.model_card import check_export

    check_configuration(derive_plan_settings(recipe))
    suffixes = {file.suffix for file in Path(recipe.model.path).glob("*")}
    if suffixes & {".safetensors", ".bin"}:  # a configuration alone is enough for planning
        check_model_folder(recipe.model.path)
    if (Path(recipe.model.path) / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(recipe.model.path)
        check_export(recipe.model, recipe.lora, recipe.method, recipe.data, tokenizer)
        return tokenizer
    return None


def plan_on(gpu: str, recipe: Recipe, num_ranks: int, lengths: LengthModel) -> prediction.RunPlan:
    """Plan the run on GPUs of this kind. Raises UserError if it does not fit, not with `engine.memory_check: false`."""
    shape, _ = prediction.find_model(recipe.model.path)
    cluster = Cluster(prediction.require_gpu(gpu), num_ranks)
    plan = prediction.plan_run(with_num_steps(recipe, lengths), cluster, shape, lengths=lengths)
    if not plan.fits and recipe.engine.memory_check:
        raise UserError(describe_shortage(plan.memory, plan.available))
    return plan


def describe_lengths(recipe: Recipe, lengths: LengthModel) -> Iterator[str]:
    num_steps = with_num_steps(recipe, lengths).num_steps
    takes = "" if num_steps is None else f"; the run takes {count(num_steps, 'step')}"
    if recipe.data.keep is not None:
        from vcore_ds.data.score_selection import read_selection  # imports numpy

        if is_readable(recipe.data.keep.scores):
            yield f"Training data: {read_selection(recipe.data.keep).describe()}{takes}"
    elif lengths.sampled:
        yield f"Data: {lengths.source}{takes}"
    per_step = recipe.batch.global_size - derive_plan_settings(recipe).num_trusted
    if (number := count_sequences(recipe.data, lengths)) and (warning := warn_of_repeats(per_step / number)):
        yield f"Warning: {warning}"


def describe_rows(
    recipe: Recipe, tokenizer: "PreTrainedTokenizerBase | None", stores: Mapping[str, str]
) -> Iterator[str]:
    """Lines on how the rows of data on this machine are read, or were when their token store was made (`stores` by
    path); on learned turns that end otherwise than the model's answers; and on paths that are not here: a typo, or data
    of the cluster."""
    paths = {key: path for key, path in recipe.data.paths().items() if is_readable(path)}
    for path in (path for key, path in paths.items() if key not in WRITTEN_BY_COMMANDS):
        from vcore_ds.data.prepare import report  # reads files: not where there are none

        try:
            lines = report.describe_reading(path, recipe.data.columns, tokenizer, recipe.data.split, stores.get(path))
        except UserError as error:  # the run reports it, too
            lines = [str(error)]
        yield from (f"Data: {line}" for line in lines)
    if tokenizer is not None:
        from vcore_ds.models.model_folder import describe_end_tokens

        yield from describe_end_tokens(recipe.model.path, tokenizer)
    if missing := [f"data.{key} {path}" for key, path in recipe.data.paths().items() if key not in paths]:
        yield f"Not on this machine, but needed where the recipe runs: {', '.join(missing)}"


def describe_ranks(recipe: Recipe, plan: BatchPlan, ds_config: dict[str, Any], lengths: LengthModel) -> Iterator[str]:
    """Lines on load balance, how to improve it, and the memory of a rank."""
    longest, settings = recipe.data.cutoff_length, derive_plan_settings(recipe)
    if recipe.parallel.tensor > 1:
        yield (
            f"Tensor parallelism: groups of {recipe.parallel.tensor} ranks, which compute on the same packs. Larger "
            "models and longer packs fit; it is no faster than ZeRO-3 over all ranks (docs/parallelism.md)"
        )
    if recipe.parallel.expert > 1:
        yield (
            f"Expert parallelism: groups of {recipe.parallel.expert} ranks, which divide the experts of each layer and "
            "exchange tokens by all-to-all (docs/parallelism.md)"
        )
    shape = find_shape(recipe.model.path)
    if shape is None:
        yield (
            f"Balance and memory are not estimated: {recipe.model.path} is not on this machine and not known by its "
            "name (download its config.json and set model.path to it)"
        )
        return
    if (warning := prediction.warn_of_positions(settings, shape[0])) is not None:
        yield warning
    utilizations = summarize_batches(simulate(plan, longest, lengths))
    for part, utilization in utilizations.items():
        yield f"Balance of the {part} batch: {utilization.describe()}"
        if utilization.is_low:
            yield f"Warning: {plan.describe_warning(part)}"
    if (memory := plan_memory(settings, plan, ds_config, utilizations, on_gpu=True)) is not None:
        yield describe_memory(memory)
    if utilizations and not lengths.sampled:
        yield f"{lengths.describe(longest)} and 8 GPUs per node; a run prints these lines for its data"
    if not is_on_disk(recipe.model.path):
        yield f"Assumed: the layers and heads of {shape[1]}, since {recipe.model.path} is not on this machine"
