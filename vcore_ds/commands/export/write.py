"""Write a Hugging Face folder from a run's folder, in a single process without GPU or process group."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import Tensor

from vcore_ds.commands.export import NEW_FOLDER, check_request
from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import lock_output
from vcore_ds.common.paths import (
    check_folder,
    compute_file_digest,
    discard,
    reading,
    refuse_existing,
    unfinished_path,
    writing,
)
from vcore_ds.config.exports import CARD
from vcore_ds.config.schema import Recipe
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.engine.checkpoint_shards import checkpoint_name
from vcore_ds.engine.export_shards import PREFIX, CheckpointTensors
from vcore_ds.models import model_folder
from vcore_ds.models.architecture_check import check_model_folder
from vcore_ds.models.description import DTYPES, read_model
from vcore_ds.models.lora import build_empty_adapted_model, find_adapters
from vcore_ds.models.megatron.weight_slices import WeightSlice, copy_to_weight, weight_slices
from vcore_ds.models.model_identity import identify_base_model, is_hub_id, read_card_metadata
from vcore_ds.models.safetensors_ranges import read_header, read_tensor
from vcore_ds.models.stored_weights import FolderWeights, describe_weights
from vcore_ds.training import checkpoint_folder
from vcore_ds.training.checkpoint_read import compute_frozen_digest
from vcore_ds.training.model_card import Kind, make_model_card


class CheckpointWeights:
    """The fp32 master weights in a checkpoint's optimizer state."""

    def __init__(self, folder: Path):
        self.name, self.digest = folder.name, checkpoint_folder.read_digest(folder)
        state = checkpoint_folder.read_run_state(folder)
        self.base_digest = state.get("frozen_digest")
        self.shapes = {name.removeprefix(PREFIX): torch.Size(shape) for name, shape in state["shapes"].items()}
        self._tensors = CheckpointTensors(folder / checkpoint_folder.STATE)

    def read(self, name: str) -> Tensor:
        return self._tensors.read(f"master.{PREFIX}{name}").view(self.shapes[name])


class AdapterWeights:
    """The adapter of a finished run, for a run whose checkpoints were removed."""

    def __init__(self, folder: Path):
        self.name, file = folder.name, SAFETENSORS_WEIGHTS_NAME
        self.digest = compute_file_digest(folder / file)
        self.base_digest = read_card_metadata(folder / CARD).get("base_digest")
        self._tensors = read_header(folder / file)
        self._stored = {name.removesuffix(".weight") + ".default.weight": name for name in self._tensors}
        self.shapes = {name: torch.Size(self._tensors[key].shape) for name, key in self._stored.items()}

    def read(self, name: str) -> Tensor:
        return read_tensor(self._tensors[self._stored[name]], self._stored[name])


class ParallelCheckpointWeights:
    """The fp32 master weights of tensor-parallel layers in a checkpoint, joined to the weights of the Hugging Face
    model."""

    def __init__(self, folder: Path, recipe: Recipe):
        self.name, self.digest = folder.name, checkpoint_folder.read_digest(folder)
        path, config = recipe.model.path, read_model(recipe.model.path).config
        self.shapes = {name: like.shape for name, like in describe_weights(path, torch.float32).items()}
        self._tensors = CheckpointTensors(folder / checkpoint_folder.STATE)
        self._shard_shapes: dict[str, list[int]] = checkpoint_folder.read_run_state(folder)["shapes"]
        self._shards: dict[str, list[tuple[str, str, WeightSlice]]] = {}
        size = recipe.parallel.tensor
        for rank in range(size):
            for name, piece in weight_slices(config, rank=rank, size=size).items():
                shard = (name, f"master.{checkpoint_name(name, rank, size)}", piece)
                self._shards.setdefault(piece.name, []).append(shard)

    def read(self, name: str) -> Tensor:
        weight = torch.empty(self.shapes[name])
        for parameter, stored, piece in self._shards[name]:
            values = self._tensors.read(stored).view(self._shard_shapes[parameter])
            copy_to_weight({name: weight}, values, piece)
        return weight


TrainedWeights = CheckpointWeights | AdapterWeights | ParallelCheckpointWeights
"""The trained parameters of a run: `shapes` by name in the (adapted) Hugging Face model, `read`, one at a time, on the
CPU, and `digest`, which the model card keeps: an extended run writes other weights under the same checkpoint's name."""


def export_run(
    run: Path,
    *,
    checkpoint: str | None = None,
    output: Path | None = None,
    merge: bool = False,
    dtype: str | None = None,
    base_model: str | None = None,
    evaluations: Sequence[Path] = (),
    reuse: bool = False,
    max_file_bytes: int = model_folder.MAX_FILE_BYTES,
) -> Path:
    """Write the full weights, or the adapter of a LoRA run, or (`merge`) the model with the adapter merged in; return
    the folder. Holds about one weight file in memory, and changes nothing in the run, which may be training.

    `checkpoint` is a name in `run/checkpoints`; None for the newest that verifies, or the adapter of a finished run
    without checkpoints. `output` is a new folder; None for `run/export/CHECKPOINT/KIND`. `dtype` is `bf16` or `fp32`;
    None for the run's precision (an adapter: fp32, which it was trained in). `base_model` is the base model's hub id,
    for the card and an adapter's configuration. `evaluations` are folders, for the card. `reuse` returns
    `run/export/chat`, a cache that is written anew where it has other weights; the caller has locked it.

    Raises UserError for a user's mistake, a full disk or another process that writes the folder, BadExport where the
    files read back differ from what was written; no folder `output` remains then."""
    recipe = check_request(run, checkpoint, output, merge=merge)
    if base_model is not None and not is_hub_id(base_model):
        raise UserError(f"--base-model: found {base_model}; expected OWNER/NAME, its id on the hub")
    check_model_folder(recipe.model.path)  # for its configuration and for weights that were not trained
    # Checked before the checksums, which take minutes.
    with writing("--output", output or run / "export", NEW_FOLDER):
        check_folder(output or run / "export")
    with reading("RUN", run, "the folder of a run"):
        trained = find_trained_weights(run, checkpoint, recipe)
    kind: Kind = "model" if recipe.lora is None else "merged" if merge else "adapter"
    # Never a folder of the user's with `reuse`: what it holds is deleted.
    folder = run / "export" / "chat" if reuse else output or run / "export" / trained.name / kind
    base_digest = None if isinstance(trained, ParallelCheckpointWeights) else trained.base_digest
    if merge and base_digest not in (None, compute_frozen_digest(recipe.model.path, has_adapters=True)):
        raise UserError(
            f"model.path: {recipe.model.path}: found other weights than those that the adapters of {run} were trained "
            "on; expected the same, to merge them. Restore it"
        )
    with nullcontext() if reuse else lock_output(folder):
        if reuse:
            if read_card_metadata(folder / CARD).get("checkpoint") == trained.digest:
                return folder
            shutil.rmtree(folder, ignore_errors=True)
        refuse_existing(folder, NEW_FOLDER)
        card = make_model_card(
            run,
            recipe.model.path,
            recipe.lora,
            recipe.method,
            recipe.data,
            kind,
            step=checkpoint_folder.parse_step(Path(trained.name)),
            base=identify_base_model(recipe.model.path, hub_id=base_model),
            evaluations=evaluations,
            base_digest=base_digest,
            checkpoint=trained.digest,
        )
        print(f"{kind} of {trained.name}", flush=True)
        wanted = DTYPES[dtype or ("fp32" if kind == "adapter" else recipe.model.precision)]
        try:
            with writing("--output", folder, NEW_FOLDER):
                if kind == "adapter":
                    num_bytes = export_adapter(recipe, trained, folder, card, wanted, base_model)
                else:
                    num_bytes = write_model(recipe, trained, folder, card, wanted, max_file_bytes)
        except BaseException:
            discard(unfinished_path(folder))
            raise
        print(f"Result: {folder} (Hugging Face format), {num_bytes / 1e9:.3g} GB of weights")
    return folder


def find_trained_weights(run: Path, name: str | None, recipe: Recipe) -> TrainedWeights:
    """Open the named checkpoint, or the newest that verifies, or the adapter of a finished run without checkpoints.
    Raises UserError where there is none; with the reason for each existing checkpoint."""
    checkpoints = checkpoint_folder.list_checkpoints(run / "checkpoints")
    candidates = [folder for folder in checkpoints if name in (None, folder.name)]
    find_problem = partial(checkpoint_folder.find_problem, say=partial(print, flush=True))
    usable, problems = checkpoint_folder.find_newest_usable(candidates, find_problem)
    if usable is not None:
        for skipped in problems:
            print(f"skipped checkpoint {skipped}", flush=True)
        is_parallel = recipe.model.provider == "megatron"
        return ParallelCheckpointWeights(usable, recipe) if is_parallel else CheckpointWeights(usable)
    if problems:
        raise UserError("\n  ".join([f"{run / 'checkpoints'}: found no checkpoint that verifies:", *problems]))
    return AdapterWeights(run / "adapter")  # `check_request` has found it


def write_model(
    recipe: Recipe, trained: TrainedWeights, folder: Path, card: str, dtype: torch.dtype, max_file_bytes: int
) -> int:
    """Write all weights, with the adapter merged in; return their bytes."""
    tokenizer = load_tokenizer(recipe.model.path)
    stored = FolderWeights(recipe.model.path, describe_weights(recipe.model.path, dtype))
    stream = merge_weights(recipe, trained, stored)
    split = model_folder.plan_files(stored.stored, max_file_bytes)
    num_bytes = split.metadata["total_size"]
    unfinished = model_folder.begin(folder, num_bytes)
    for file, tensors in model_folder.collect_files(split, stream):
        expected = {name: stored.stored[name] for name in split.filename_to_tensors[file]}
        model_folder.write_file(unfinished / file, tensors, expected)
    model_folder.write_config(unfinished, recipe.model.path, dtype, is_complete=stored.is_complete)
    model_folder.finish(folder, tokenizer, card, split)
    return num_bytes


def merge_weights(recipe: Recipe, trained: TrainedWeights, stored: FolderWeights) -> Iterator[tuple[str, Tensor]]:
    """Each stored tensor with its trained value, or else the base model's value in the run's precision. Raises
    UserError before the first tensor, if the trained parameters do not match the model."""
    adapters = {}
    if recipe.lora is not None:
        adapted = build_empty_adapted_model(recipe.model.path, recipe.lora)
        check_fit(recipe, trained, {name: p.shape for name, p in adapted.named_parameters() if p.requires_grad})
        adapters = find_adapters(adapted)
        covered = {name for adapter in adapters.values() for name in (adapter.lora_a, adapter.lora_b)}
        if others := sorted(trained.shapes.keys() - covered):
            raise UserError(f"--merge: found {others[0]}; expected only adapters of linear layers and experts")
    else:
        check_fit(recipe, trained, {n: like.shape for n, like in stored.weights.items() if n in trained.shapes})
    is_complete = all(set(group.names) <= trained.shapes.keys() for group in stored.groups)
    base = {} if is_complete else read_model(recipe.model.path).stored

    def stream() -> Iterator[tuple[str, Tensor]]:
        for group in stored.groups:
            if trained.shapes.keys() >= set(group.names):
                weights = {name: trained.read(name).to(stored.weights[name].dtype) for name in group.names}
                yield from stored.store(group.names, weights).items()
                continue
            changes = {}
            if adapters.keys() & set(group.names):
                # Splits the change as the base model's files split its weights, which then need no joining.
                changes = stored.store(group.names, {name: compute_change(name) for name in group.names})
            for name, like in group.stored.items():
                if name not in base:
                    raise UserError(f"model.path: {recipe.model.path}: found no tensor {name} in its safetensors files")
                weight = read_tensor(base[name], name).to(DTYPES[recipe.model.precision])
                if name in changes:
                    weight = weight.float() + changes[name]
                yield name, weight.to(like.dtype)
        for name in stored.copied:
            yield name, stored.read_copied(name)

    def compute_change(name: str) -> Tensor:
        if name not in adapters:
            return torch.zeros(stored.weights[name].shape)
        adapter = adapters[name]
        return adapter.compute_update(trained.read(adapter.lora_a).float(), trained.read(adapter.lora_b).float())

    return stream()


def check_fit(recipe: Recipe, trained: TrainedWeights, expected: Mapping[str, torch.Size]) -> None:
    """Raises UserError if the trainable parameters of the model at model.path differ from those of the run."""
    differing = sorted({name for name, _ in expected.items() ^ trained.shapes.items()})
    if differing:
        raise UserError(
            f"model.path: {recipe.model.path}: does not match the trained parameters: {', '.join(differing[:5])}; "
            "expected the base model of the run"
        )


def export_adapter(
    recipe: Recipe, trained: TrainedWeights, folder: Path, card: str, dtype: torch.dtype, base_model: str | None
) -> int:
    """Write the adapter in peft's format; return the bytes of its weights."""
    assert recipe.lora is not None
    adapted = build_empty_adapted_model(recipe.model.path, recipe.lora)
    expected = {name: parameter.shape for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    check_fit(recipe, trained, expected)
    if base_model is not None:
        adapted.active_peft_config.base_model_name_or_path = base_model
    adapter = {name: trained.read(name).to(dtype) for name in expected}
    return model_folder.write_adapter(adapted, adapter, folder, load_tokenizer(recipe.model.path), card)
