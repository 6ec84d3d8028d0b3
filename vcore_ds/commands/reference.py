"""`vcore-ds reference`: the log-probabilities that iw-SFT needs if all parameters are trained, one per sequence.

It compares the model with its initial state, which no longer exists after the first step.
"""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from vcore_ds.commands.arguments import add_recipe
from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.paths import check_folder, refuse_existing, writing
from vcore_ds.common.text import count
from vcore_ds.config.load import load_recipe, make_override
from vcore_ds.config.schema import Recipe
from vcore_ds.data.prepare.sources import check_inputs

if TYPE_CHECKING:
    from vcore_ds.data.dataset import Store
    from vcore_ds.engine.zero3 import Engine
    from vcore_ds.training.feed import Feed

HELP = "compute the reference log-probabilities for iw_sft"
DESCRIPTION = (
    "Compute the log-probability of every training sequence under the initial model, with one forward over the data. "
    "Full fine-tuning with methods/iw_sft.yaml needs it before training; LoRA does not. Runs as one process, or under "
    "a launcher as one process per rank. Example: vcore-ds reference RECIPE.yaml --output reference.npz"
)
NEW_FILE = "a new file in a folder that can be written"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="file to write (.npz)")


def main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if recipe.lora is not None:
        raise UserError(
            "lora: found adapters; expected null: with lora the reference of iw_sft is the model without its adapters, "
            "and training needs no file"
        )
    refuse_existing(arguments.output, NEW_FILE)
    check_inputs(recipe.model.path, recipe.data)
    write_reference_log_probabilities(recipe, arguments.output)


def write_reference_log_probabilities(recipe: Recipe, output: Path) -> None:
    """Compute them on all ranks of the job, and write `output` (.npz) on rank 0. A collective. Raises UserError where
    `output` cannot be written, or the recipe, its model or its data cannot be used."""
    with lasting_imports():
        from vcore_ds.data.dataset import write_reference
        from vcore_ds.data.tokenization import load_tokenizer
        from vcore_ds.distributed.position import mark
        from vcore_ds.distributed.process_group import run_on_first_rank
        from vcore_ds.distributed.watchdog import watching
        from vcore_ds.models.architecture_check import check_architecture
        from vcore_ds.planning.deepspeed_json import deepspeed_config
        from vcore_ds.planning.settings import derive_plan_settings
        from vcore_ds.training import console
        from vcore_ds.training.feed import DataReader, build_feed
        from vcore_ds.training.setup import build_engine, plan_ranks, start_ranks
        from vcore_ds.training.start_checks import check_start
        from vcore_ds.training.start_screen import describe_training

    def check_output() -> None:  # before a forward that may take hours
        with writing("--output", output, NEW_FILE):
            check_folder(output.parent)

    def write() -> None:
        with writing("--output", output, NEW_FILE):
            write_reference(output, dataset, values, recipe.model.path)

    settings = derive_plan_settings(recipe)
    check_architecture(settings)
    start_ranks(recipe.engine, recipe.parallel)
    with watching(recipe.engine.lost_rank_seconds, recipe.engine.timeout_minutes):
        run_on_first_rank(check_output)
        plan = plan_ranks(settings)
        reader = DataReader(recipe.data, recipe.model.path, load_tokenizer(recipe.model.path))
        dataset = reader.read_training_stores()
        console.say(f"Data: {describe_training(recipe.data, dataset)}")
        feed = build_feed(recipe.method, recipe.probe, plan, dataset, reader.pad_token_id, seed=recipe.run.seed)
        engine = build_engine(settings, deepspeed_config(settings, plan))
        check_start(engine, feed)
        mark("log-probabilities")
        values = _compute(feed, dataset, engine)
        run_on_first_rank(write)
        engine.close()
    override = shlex.quote(make_override("data.reference_log_probabilities", output))
    console.say(f"Written: {output}, {count(len(dataset), 'sequence')}. Train with: methods/iw_sft.yaml {override}")


def _compute(feed: "Feed", dataset: "Store", engine: "Engine") -> list[float]:
    """The log-probability of each sequence in nats, in the order of the data. A collective."""
    from vcore_ds.distributed import layout
    from vcore_ds.training import console
    from vcore_ds.training.weighting import compute_log_probabilities

    micro_batch_size = feed.plan.utility_micro_batch_size_per_rank
    # Sorted by length, so that the sequences of a group balance the ranks.
    by_length = sorted(range(len(dataset)), key=lambda i: -dataset.lengths[i])
    group_size = feed.plan.num_ranks * (micro_batch_size or 1) * 8
    by_id: dict[int, float] = {}
    with console.progress("Log-probabilities of the training data", sum(map(int, dataset.lengths))) as progress:
        for start in range(0, len(dataset), group_size):
            group = by_length[start : start + group_size]
            batches = feed.batches(group, micro_batch_size)
            rank_values: dict[int, float] = {}
            for batch, values in zip(batches, compute_log_probabilities(engine, batches), strict=True):
                # Not strict: a padding pack has no ids.
                rank_values.update(zip(batch.sequence_ids, values.double().tolist(), strict=False))
            for part in layout.gather_objects("job", rank_values):
                by_id |= part
            progress.advance(sum(int(dataset.lengths[i]) for i in group))
    return [by_id[int(sequence_id)] for sequence_id in dataset.sequence_ids]
