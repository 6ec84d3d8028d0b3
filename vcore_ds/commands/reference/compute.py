"""Log-probabilities of the training sequences under the initial model, one number per sequence.

iw-SFT with all parameters trained compares the model with its initial state, which no longer exists after the first
step.
"""

import shlex
from pathlib import Path

from vcore_ds.commands.reference import NEW_FILE
from vcore_ds.common.paths import check_folder, writing
from vcore_ds.common.text import count
from vcore_ds.config.load import make_override
from vcore_ds.config.schema import Recipe
from vcore_ds.data.dataset import Store, write_reference
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import run_on_first_rank
from vcore_ds.distributed.watchdog import watching
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.architecture_check import check_model
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.train.console import Console
from vcore_ds.train.feed import DataReader, Feed, build_feed
from vcore_ds.train.settings import derive_engine_settings, derive_step_settings
from vcore_ds.train.setup import build_engine, plan_ranks, start_ranks
from vcore_ds.train.start_checks import check_start
from vcore_ds.train.start_screen import describe_training
from vcore_ds.train.weighting import compute_log_probabilities


def write_reference_log_probabilities(recipe: Recipe, output: Path) -> None:
    """Compute them on all ranks of the job, and write `output` (.npz) on rank 0. A collective.

    Raises:
        UserError: `output` cannot be written, or the recipe, its model or its data cannot be used.
    """
    check_model(derive_plan_settings(recipe))
    start_ranks(recipe.engine, recipe.parallel)
    with watching(recipe.engine.lost_rank_seconds, recipe.engine.timeout_minutes):
        _compute_and_write(recipe, output)


def _compute_and_write(recipe: Recipe, output: Path) -> None:
    run_on_first_rank(lambda: check_output(output))
    console = Console(enabled=layout.is_first())
    settings = derive_plan_settings(recipe)
    plan = plan_ranks(settings)
    reader = DataReader(recipe.data, recipe.model.path, load_tokenizer(recipe.model.path), console)
    dataset = reader.read_training_stores()
    console.say(f"Data: {describe_training(recipe.data, dataset)}")
    feed = build_feed(derive_step_settings(recipe), plan, dataset, reader.pad_token_id, seed=recipe.run.seed)
    engine = build_engine(derive_engine_settings(recipe), deepspeed_config(settings, plan))
    check_start(engine, feed, console)
    by_position: dict[int, float] = {}
    num_sequences = len(dataset)
    # Sorted by length, so that the sequences of a group balance the ranks.
    by_length = sorted(range(num_sequences), key=lambda i: -dataset.lengths[i])
    group_size = plan.num_ranks * (plan.utility_micro_batch_size_per_rank or 1) * 8
    with console.progress("Log-probabilities of the training data", sum(map(int, dataset.lengths))) as progress:
        for start in range(0, num_sequences, group_size):
            group = by_length[start : start + group_size]
            by_position.update(_compute_group(feed, dataset, engine, group))
            progress.advance(sum(int(dataset.lengths[i]) for i in group))
    values = [by_position[i] for i in range(num_sequences)]
    run_on_first_rank(lambda: write(output, dataset, values, recipe.model.path))
    engine.close()
    override = shlex.quote(make_override("data.reference_log_probabilities", output))
    console.say(f"Written: {output}, {count(num_sequences, 'sequence')}. Train with: methods/iw_sft.yaml {override}")


def check_output(output: Path) -> None:
    """Raises UserError if `output` cannot be written, before a forward that may take hours."""
    with writing("--output", output, NEW_FILE):
        check_folder(output.parent)


def write(output: Path, dataset: Store, log_probabilities: list[float], model: str) -> None:
    """Write the file. Raises UserError if `output` cannot be written."""
    with writing("--output", output, NEW_FILE):
        write_reference(output, dataset, log_probabilities, model)


def _compute_group(feed: Feed, dataset: Store, engine: Engine, positions: list[int]) -> dict[int, float]:
    """Position in the data -> log-probability in nats, for the sequences at `positions`. A collective."""
    position_of = {int(dataset.sequence_ids[i]): i for i in positions}
    batches = feed.batches(positions, feed.plan.utility_micro_batch_size_per_rank)
    rank_values: dict[int, float] = {}
    for batch, values in zip(batches, compute_log_probabilities(engine, batches), strict=True):
        rank_values.update(zip(batch.sequence_ids, values.double().tolist(), strict=False))  # a padding pack has no ids
    return {position_of[i]: value for part in layout.gather_objects("job", rank_values) for i, value in part.items()}
