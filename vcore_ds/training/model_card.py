"""The result of a run but for its weights: the model card, and a rehearsal at the start of the run."""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import EvalResult, ModelCardData
from transformers import PreTrainedTokenizerBase

from vcore_ds.common.errors import UserError
from vcore_ds.config.data_section import DataConfig
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.sections import LoraConfig, ModelConfig
from vcore_ds.models import model_folder
from vcore_ds.models.description import DTYPES
from vcore_ds.models.lora import build_empty_adapted_model, load_adapter
from vcore_ds.models.model_identity import CARD_TAG, BaseModel, check_adapter_base, identify_base_model
from vcore_ds.models.stored_weights import FolderWeights, describe_weights
from vcore_ds.training import console, run_folder
from vcore_ds.training.evaluation_folder import read_evaluation

Kind = Literal["adapter", "model", "merged"]


def make_model_card(
    run: Path,
    model: str,
    lora: LoraConfig | None,
    method: MethodConfig,
    data: DataConfig,
    kind: Kind,
    *,
    step: int | None = None,
    base: BaseModel | None = None,
    base_digest: str | None = None,
    evaluations: Sequence[Path] = (),
    checkpoint: str | None = None,
) -> str:
    """Return the text of the card, with the hub's metadata; of paths it shows only the last names. `model`:
    model.path. `step`: of the exported checkpoint; None for the end of the run. `base`: None to identify it by
    `model`. `base_digest`: of the model under adapters. `evaluations`: their folders. `checkpoint`: digest of the
    exported checkpoint. Raises UserError if a file of the run or of an evaluation is damaged."""
    base = base or identify_base_model(model)
    names = dict.fromkeys(Path(path).name for path in data.paths().values())
    tasks = [item for path in evaluations for item in read_evaluation(path, "--evaluation").tasks.items()]
    try:
        last_step = int(run_folder.read_run_metrics(run)[-1]["step"] or 0)
    except UserError:  # removed or damaged, and optional for the card
        last_step = None
    num_steps = last_step if step is None else step
    after = "" if num_steps is None else f" for {num_steps:,} optimizer steps"
    trained = "all parameters" if kind == "model" else "LoRA"
    earlier = base.stages if lora is None or lora.adapter is None else identify_base_model(lora.adapter).stages
    stages = [*earlier, f"{method.title} ({trained}){after}, run {run.resolve().name}"]
    title = f"{base.name}, fine-tuned with {method.title} ({trained})"
    license_keys: dict[str, Any] = dict(base.license)
    results = [EvalResult("text-generation", name, name, "accuracy", round(one.accuracy, 4)) for name, one in tasks]
    metadata = ModelCardData(
        base_model=base.hub_id,
        base_model_relation=None if base.hub_id is None else "adapter" if kind == "adapter" else "finetune",
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=[CARD_TAG, method.name, *([] if kind == "model" else ["lora"])],
        eval_results=results or None,
        model_name=title if results else None,
        checkpoint=checkpoint,
        base_digest=base_digest,
        stages=[base.name, *stages],
        **license_keys,
    )
    link = f"[{base.hub_id}](https://huggingface.co/{base.hub_id})" if base.hub_id else f"`{base.name}`"
    what = {"adapter": "A LoRA adapter for", "merged": "A LoRA adapter merged into", "model": "A fine-tuned"}[kind]
    opener = "AutoPeftModelForCausalLM` of peft" if kind == "adapter" else "AutoModelForCausalLM` of transformers"
    paragraphs = [
        f"{what} {link}, trained with `vcore_ds`, method `{method.title}`{after}. Open it with `{opener}; its "
        "tokenizer has the chat template of training.",
        *([f"Stages of training from `{base.name}`: {'; '.join(stages)}"] if earlier else ()),
        f"Data: {', '.join(f'`{name}`' for name in names)}",
        f"License of the base model, which applies here too: {base.license.get('license', 'unknown')}",
        *(_list_losses(run) if num_steps == last_step else ()),  # of the end of the run
        *(f"Accuracy on {name}: {one.accuracy:.1%} of {one.num_problems:,} problems" for name, one in tasks),
    ]
    return "\n\n".join([f"---\n{metadata.to_yaml()}\n---", f"# {title}", *paragraphs]) + "\n"


def _list_losses(run: Path) -> Iterator[str]:
    losses = run_folder.read_held_out_losses(run)
    for name, loss in losses.after.items():
        before = f", before {losses.before[name]:.4f}" if name in losses.before else ""
        yield f"Held-out loss{name and ' on '}{name}: {loss:.4f} nats{before}"


def check_export(
    model: ModelConfig,
    lora: LoraConfig | None,
    method: MethodConfig,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write the run's result without weights into a temporary folder: what would fail after days fails before the model
    is loaded. Raises what the end of the run would raise."""
    with tempfile.TemporaryDirectory() as temporary:
        if lora is not None and lora.adapter is not None:
            if (warning := check_adapter_base(Path(lora.adapter), model.path)) is not None:
                console.warn(warning)
            load_adapter(build_empty_adapted_model(model.path, lora), Path(lora.adapter))
        card = make_model_card(Path(temporary), model.path, lora, method, data, "model" if lora is None else "adapter")
        write_without_weights(model, lora, tokenizer, card, Path(temporary) / "result")


def write_without_weights(
    model: ModelConfig, lora: LoraConfig | None, tokenizer: PreTrainedTokenizerBase, card: str, folder: Path
) -> None:
    """Write `folder`, the result with an adapter of empty tensors or with empty files in place of the weights."""
    path = model.path
    if lora is not None:
        adapted = build_empty_adapted_model(path, lora)
        empty = {name: torch.empty(0) for name, p in adapted.named_parameters() if p.requires_grad}
        model_folder.write_adapter(adapted, empty, folder, tokenizer, card)
        return
    dtype = DTYPES[model.precision]
    stored = FolderWeights(path, describe_weights(path, dtype))
    split = model_folder.plan_files(stored.stored, model_folder.MAX_FILE_BYTES)
    unfinished = model_folder.begin(folder, num_bytes=0)
    weights = ((name, stored.weights[name]) for group in stored.groups for name in group.names)
    names = itertools.chain(stored.stream(weights), dict.fromkeys(stored.copied).items())  # and no values
    for file, _ in model_folder.collect_files(split, names):
        (unfinished / file).touch()
    model_folder.write_config(unfinished, path, dtype, is_complete=stored.is_complete)
    model_folder.finish(folder, tokenizer, card, split)
