"""`vcore-ds export`: write a Hugging Face folder from a run's checkpoint, and push it to the hub."""

import argparse
from pathlib import Path

from vcore_ds.common.errors import UserError

HELP = "write a Hugging Face folder from a run's checkpoint"
DESCRIPTION = (
    "Write the full weights, the adapter, or the model with the adapter merged in, from a checkpoint of any world "
    "size, with a model card. Runs in one process without a GPU, and holds about one weight file in memory. --push "
    "also uploads the folder to the Hugging Face hub. Example: vcore-ds export runs/my_run --merge --output my_model"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run's folder (run.output_dir)")
    add("--checkpoint", metavar="NAME", help="a checkpoint of the run, such as step_00000100 (default: the newest)")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="new folder (default: model, adapter or merged in RUN/export/CHECKPOINT)",
    )
    add("--merge", action="store_true", help="for a LoRA run: merge the adapter into the model")
    add("--dtype", choices=["bf16", "fp32"], help="dtype of the weights (default: the run's; for an adapter fp32)")
    add("--base-model", metavar="OWNER/NAME", help="hub id of the base model, for the card (default: from model.path)")
    evaluation = "folder with an evaluation.json of this result, for the model card; repeat it for several"
    add("--evaluation", type=Path, action="append", default=[], metavar="DIR", help=evaluation)
    add("--push", metavar="OWNER/NAME", help="upload the folder to this repository on the hub; a new one is private")


def main(arguments: argparse.Namespace) -> None:
    from vcore_ds.commands.export.write import export_run, open_hub, push_folder
    from vcore_ds.models.model_identity import identify_base_model, is_hub_id
    from vcore_ds.training.run_folder import read_run_recipe

    if arguments.base_model is not None and not is_hub_id(arguments.base_model):
        raise UserError(f"--base-model: found {arguments.base_model}; expected OWNER/NAME, its id on the hub")
    base, api = None, None
    if arguments.push is not None:
        api = open_hub(arguments.push)
    if api is not None or arguments.base_model is not None:
        path = read_run_recipe(arguments.run).model.path
        base = identify_base_model(path, hub_id=arguments.base_model, ask_hub=api is not None)
    folder = export_run(
        arguments.run,
        checkpoint=arguments.checkpoint,
        output=arguments.output,
        merge=arguments.merge,
        dtype=arguments.dtype,
        base=base,
        evaluations=arguments.evaluation,
        reuse=api is not None and arguments.dtype is None,
    )
    if api is None or base is None:
        return
    if base.hub_id is None:
        print(
            f"The base model's hub id is unknown: the card and the configuration say {base.name}. Set it with "
            "--base-model OWNER/NAME"
        )
    print(f"Pushed: {push_folder(api, folder, arguments.push, base)}")
