"""`vcore-ds export`: write a Hugging Face folder from a run's checkpoint."""

import argparse
from pathlib import Path

from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.paths import reading, refuse_existing
from vcore_ds.config.schema import Recipe
from vcore_ds.data.hub import check_on_hub
from vcore_ds.training import checkpoint_folder
from vcore_ds.training.run_folder import read_run_recipe

HELP = "write a Hugging Face folder from a run's checkpoint"
DESCRIPTION = (
    "Write the full weights, the adapter, or the model with the adapter merged in, from a checkpoint of any world "
    "size, with a model card. Runs in one process without a GPU, and holds about one weight file in memory. Example: "
    "vcore-ds export runs/my_run --merge --output my_model. `hf upload OWNER/NAME my_model --private` puts it on the "
    "hub."
)
NEW_FOLDER = "a new folder that can be written, with room for the weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run's folder (run.output_dir)")
    add("--checkpoint", metavar="NAME", help="a checkpoint of the run, such as step_00000100 (default: the newest)")
    output = "new folder (default: model, adapter or merged in RUN/export/CHECKPOINT)"
    add("--output", type=Path, metavar="DIR", help=output)
    add("--merge", action="store_true", help="for a LoRA run: merge the adapter into the model")
    add("--dtype", choices=["bf16", "fp32"], help="dtype of the weights (default: the run's; for an adapter fp32)")
    base = "hub id of the base model, for the card and an adapter's configuration (default: from model.path)"
    add("--base-model", metavar="OWNER/NAME", help=base)
    evaluation = "folder with an evaluation.json of this result, for the model card; repeat it for several"
    add("--evaluation", dest="evaluations", type=Path, action="append", default=[], metavar="DIR", help=evaluation)


def check_request(run: Path, checkpoint: str | None, output: Path | None, *, merge: bool) -> Recipe:
    """Check what an export names without torch, and return the run's recipe; arguments as in `export_run`. Raises
    UserError."""
    recipe = read_run_recipe(run)
    if merge and recipe.lora is None:
        raise UserError(f"{run}: found --merge with a run that trained all parameters; expected no --merge")
    if output is not None:
        refuse_existing(output, NEW_FOLDER)
    with reading("RUN", run, "the folder of a run"):
        names = [folder.name for folder in checkpoint_folder.list_checkpoints(run / "checkpoints")]
        is_there = checkpoint in names if checkpoint else bool(names) or (run / "adapter").is_dir()
        if not is_there:
            expected, there = checkpoint or "a complete checkpoint", ", ".join(names) or "none"
            raise UserError(f"{run / 'checkpoints'}: expected {expected}; found {there}")
    check_on_hub(recipe.model.path, "model", "model.path: ", asks=False)
    return recipe


def main(arguments: argparse.Namespace) -> None:
    check_request(arguments.run, arguments.checkpoint, arguments.output, merge=arguments.merge)
    with lasting_imports():
        from vcore_ds.commands.export.write import export_run

    names = ("checkpoint", "output", "merge", "dtype", "base_model", "evaluations")
    export_run(arguments.run, **{name: getattr(arguments, name) for name in names})
