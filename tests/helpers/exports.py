"""Runs to export, made without training: a recipe and a checkpoint with given parameters."""

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.recipes import smallest_recipe
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.training import checkpoint_folder

LORA = {"rank": 4, "alpha": 12, "dropout": 0.0}


def write_checkpoint(run: Path, step: int, masters: dict[str, Tensor]) -> Path:
    unfinished = checkpoint_folder.begin(run / "checkpoints", step, 0)
    state = {f"master.{name}": tensor.flatten() for name, tensor in masters.items()}
    state |= {f"exp_avg.{name}": torch.full((tensor.numel(),), torch.nan) for name, tensor in masters.items()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(unfinished / "state"), no_dist=True)
    shapes = {name: list(tensor.shape) for name, tensor in masters.items()}
    (unfinished / "run_state.json").write_text(json.dumps({"step": step, "world_size": 1, "shapes": shapes}))
    written = [path for path in unfinished.rglob("*") if path.is_file()]
    records = {path.relative_to(unfinished).as_posix(): checkpoint_folder.hash_file(path) for path in written}
    return checkpoint_folder.finish(run / "checkpoints", step, 1, records)


def write_run(run: Path, base: Path, masters: dict[str, Tensor], *, lora: bool | dict, precision: str = "bf16") -> Path:
    """Write a run with one checkpoint. `lora`: the recipe's section, or whether to use `LORA`."""
    section = lora if isinstance(lora, dict) else LORA if lora else None
    changes = {"model": {"path": str(base), "precision": precision}, "lora": section}
    run.mkdir()
    (run / "recipe.yaml").write_text(dump_recipe(Recipe.model_validate(smallest_recipe() | changes)))
    write_checkpoint(run, 20, masters)
    return run


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors in the safetensors files of a folder, by name."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
