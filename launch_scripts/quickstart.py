"""The quickstart: train a pretrained model on recorded solutions or on the user's file, prepared on the way."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch_scripts.quickstart_data import prepare_model, prepare_quickstart_data
from vcore_ds.commands.evaluate import evaluate_run
from vcore_ds.commands.report import write_report
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import reading
from vcore_ds.config.load import SHIPPED_RECIPES, load_recipe, make_override
from vcore_ds.config.schema import Recipe, flat_values
from vcore_ds.data.prepare.sources import check_source, find_files
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import run_on_first_rank
from vcore_ds.training.setup import start_ranks

REPOSITORY = Path(__file__).resolve().parents[1]
DATA = REPOSITORY / "runs" / "quickstart_data"
RECIPE = SHIPPED_RECIPES / "quickstart.yaml"
SCRIPT = "launch_scripts/quickstart.sh"
OWN_CUTOFF_LENGTH = 2_048  # data.cutoff_length for the user's data, in tokens
MOST_HELD_OUT = 16  # most rows of the user's file that are held out; a tenth of a small file


def prepare(overrides: Sequence[str]) -> list[str]:
    """Prepare model and data on rank 0, and return overrides with their paths and an unused output folder. Collective.
    Raises UserError where the overrides are wrong, or model and data cannot be made or written."""
    recipe, added = load_with_additions(overrides)
    start_ranks(recipe.engine, recipe.parallel)
    words: list[str] = layout.gather_objects("job", run_on_first_rank(lambda: prepare_files(recipe, overrides)))[0]
    return added + words


def load_with_additions(overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """Load the recipe, and overrides that the user's need: no steps beside epochs, no held-out sets beside a share, and
    the quickstart's trusted traces for its data (presets/trusted.yaml)."""
    given = {override.partition("=")[0] for override in overrides}
    added = []
    if "schedule.num_epochs" in given and "schedule.num_steps" not in given:
        added.append(make_override("schedule.num_steps", None))
    if "data.validation_share" in given:
        added.append(make_override("data.validation_path", None))
    try:
        return load_recipe(RECIPE, [*added, *overrides]), added
    except UserError:
        pool = [*added, make_override("data.probe_path", DATA / "trusted.jsonl")]
        with suppress(UserError):
            if "data.train_path" not in given:
                return load_recipe(RECIPE, [*pool, *overrides]), pool
        raise


def prepare_files(recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """Make model and data, and return overrides with their paths and an unused output folder, without keys that the
    user has set in overrides or fragments."""
    folder = REPOSITORY / recipe.run.output_dir
    folders = itertools.chain([folder], (folder.with_name(f"{folder.name}_{i}") for i in itertools.count(2)))
    values: dict[str, Any] = {"run.output_dir": next(path for path in folders if not path.exists())}
    shipped, wanted = flat_values(load_recipe(RECIPE)), flat_values(recipe)
    chosen = {key for key, value in wanted.items() if key not in shipped or value != shipped[key]}  # in fragments
    chosen |= {word.partition("=")[0] for word in overrides}
    split: dict[str, Any] = {}
    if "data.train_path" not in chosen:
        data = prepare_quickstart_data(DATA)
        values |= {"model.path": data.model, "data.train_path": data.train}
        if "data.validation_path" not in chosen:
            values["data.validation_path"] = {"correct": str(data.correct), "incorrect": str(data.incorrect)}
            values["run.validate_every"] = 4  # not after each of the eight steps
    else:
        for file in recipe.data.train_files():
            check_source(file.path, recipe.data.split)  # before anything that takes long
        if "model.path" not in chosen:
            values["model.path"] = prepare_model(DATA)
        if "schedule.num_steps" not in chosen:
            values |= {"schedule.num_steps": None, "schedule.num_epochs": 1}
        values["data.cutoff_length"] = OWN_CUTOFF_LENGTH
        if "data.validation_path" not in chosen:
            split = {"data.validation_path": None, "data.validation_share": choose_share(recipe.data.train_name())}
    kept = {key: value for key, value in values.items() if key not in chosen} | split
    return [make_override(key, value) for key, value in kept.items()]


def choose_share(source: str) -> float | None:
    """Choose `data.validation_share` for a file of conversations: a tenth of its rows, `MOST_HELD_OUT` at most; None
    for other data than a single file, and for a single row."""
    path = Path(source)
    if not path.is_file():
        print(f"{source}: not a single file, so nothing is held out; data.validation_path names data to hold out")
        return None
    with reading("", path, "conversations that can be read"):
        if path.suffix.lower() == ".jsonl":
            number = sum(bool(line.strip()) for line in path.read_bytes().split(b"\n"))
        else:
            number = sum(1 for _ in find_files([source], "train")[0].rows())
    if number < 2:
        return None
    share = min(0.1, MOST_HELD_OUT / number)
    print(f"{source}: {number:,} rows, {share:.2g} of them held out (data.validation_share)")
    return share


def finish(run: Path, evaluates: bool) -> None:
    """Evaluate the run's result if asked, and write its report, on rank 0. One that cannot be written is a warning: the
    run itself succeeded."""
    if not layout.is_first():
        return
    if evaluates:
        evaluate_run(run)
    try:
        (page,) = write_report([run])  # last, so that it includes the evaluation
        print(f"Report: {page} (open it in a browser)", flush=True)
    except UserError as error:
        print(f"warning: no report: {error}", flush=True)
    print(
        f"Next: bash {SCRIPT} schedule.num_steps=100  # trains longer\n"
        f"      bash {SCRIPT} data.train_path=my_traces.jsonl  # trains on your traces; more in README.md"
    )
