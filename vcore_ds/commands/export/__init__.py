"""`vcore-ds export`: write a Hugging Face folder from a run's checkpoint."""

import argparse
from pathlib import Path

HELP = "write a Hugging Face folder from a run's checkpoint"
DESCRIPTION = (
    "Write the full weights, the adapter, or the model with the adapter merged in, from a checkpoint of any world "
    "size, with a model card. Runs in one process without a GPU, and holds about one weight file in memory. Example: "
    "vcore-ds export runs/my_run --merge --output my_model. `hf upload OWNER/NAME my_model --private` puts it on the "
    "hub."
)


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


def main(arguments: argparse.Namespace) -> None:
    from vcore_ds.commands.export.write import export_run

    names = ("checkpoint", "output", "merge", "dtype", "base_model", "evaluations")
    export_run(arguments.run, **{name: getattr(arguments, name) for name in names})
