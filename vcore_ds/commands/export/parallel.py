"""What a checkpoint of parallel layers holds, as weights of the Hugging Face model."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vcore_ds.config.schema import Recipe
from vcore_ds.engine.checkpoint_shards import stored_name
from vcore_ds.engine.export_shards import CheckpointTensors
from vcore_ds.files import checkpoint_folder
from vcore_ds.models.configuration import read_config
from vcore_ds.models.folder_weights import described_weights
from vcore_ds.models.lora import empty_adapted
from vcore_ds.models.megatron.adapters import adapted_layers, adapter_pieces
from vcore_ds.models.megatron.weights import Piece, pieces, put_together


class ParallelCheckpointWeights:
    """The fp32 parameters that a checkpoint's optimizer state holds, a part of every layer under each name: see
    `vcore_ds.commands.export.write.TrainedWeights`."""

    def __init__(self, folder: Path, recipe: Recipe):
        """Args:
        folder: of the checkpoint.
        recipe: of its run.
        """
        self.name = folder.name
        path, lora, config = recipe.model.path, recipe.lora, read_config(recipe.model.path)
        if lora is None:
            described, of_rank = described_weights(path, torch.float32), partial(pieces, config)
        else:
            adapted = empty_adapted(path, config, lora)
            described = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
            of_rank = partial(adapter_pieces, adapted_layers(path, config, lora), config, lora)
        self.shapes = {name: like.shape for name, like in described.items()}
        self._tensors = CheckpointTensors(folder / checkpoint_folder.STATE)
        self._own_shapes: dict[str, list[int]] = checkpoint_folder.read_run_state(folder)["shapes"]
        self._parameters: dict[str, list[tuple[str, str, Piece]]] = {}
        size = recipe.parallel.tensor
        for rank in range(size):
            for name, piece in of_rank(rank=rank, size=size).items():
                found = self._parameters.setdefault(piece.name, [])
                found.append((name, f"master.{stored_name(name, rank, size)}", piece))

    def read(self, name: str) -> Tensor:
        """The whole weight, fp32, on the CPU."""
        whole = torch.empty(self.shapes[name])
        for parameter, stored, piece in self._parameters[name]:
            values = self._tensors.read(stored).view(self._own_shapes[parameter])
            put_together({name: whole}, values, piece)
        return whole
