"""Check whether training supports a model, before any weights are read; and count its parameters.

The model is built on the meta device as a run builds it, with adapters and token losses, and its decoder is called
once. So the same code raises here and in a run, and `vcore-ds check`, `plan` and `train` report the same errors.
"""

import re
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import reading
from vcore_ds.config.sections import LoraConfig
from vcore_ds.data.hub import check_on_hub
from vcore_ds.models.attention import TRAINING_ATTENTION, SequenceLayout, comparing_masks
from vcore_ds.models.causal_lm import TokenLossModel, freeze_towers
from vcore_ds.models.description import (
    DTYPES,
    build_empty_model,
    can_replace_attention,
    find_causal_lm_class,
    make_config_error,
    read_model,
    resolve_attention,
)
from vcore_ds.models.experts import can_replace_experts
from vcore_ds.models.lora import add_lora, build_empty_adapted_model
from vcore_ds.models.megatron.weight_slices import weight_slices
from vcore_ds.models.stored_weights import check_shapes, find_places
from vcore_ds.planning.batch_plan import explain_refused_differences
from vcore_ds.planning.known_models import CONFIG_NAME, find_folder
from vcore_ds.planning.model_shape import is_moe
from vcore_ds.planning.passes import ParameterCounts
from vcore_ds.planning.settings import PlanSettings

Estimator = Literal["jvp", "finite_difference"]


def describe_alternatives_to_jvp(config: PretrainedConfig) -> str:
    """End of messages that refuse `jvp` for an architecture."""
    difference = "finite_difference (utility.estimator=finite_difference utility.epsilon=auto), "
    return (
        f"expected {'' if _has_routing(config) else difference}another architecture, or a method without utilities "
        "(methods/sft.yaml)"
    )


def check_estimator(path: str, config: PretrainedConfig, estimator: Estimator) -> None:
    """Raise UserError if the estimator does not support this architecture, with an alternative."""
    has_jvp = can_replace_attention(config)
    if estimator == "finite_difference" and _has_routing(config):
        raise UserError(explain_refused_differences(path, has_jvp=has_jvp))
    if estimator == "jvp" and not has_jvp:
        raise UserError(
            f"utility.estimator: found jvp together with model.path {path} ({find_causal_lm_class(config).__name__}), "
            "whose attention cannot be replaced by one with a forward-mode derivative; "
            f"{describe_alternatives_to_jvp(config)}"
        )


def _has_routing(config: PretrainedConfig) -> bool:
    return is_moe(config.get_text_config().to_dict())


def _call_decoder(model: TokenLossModel) -> None:
    """Call the decoder once on the meta device: our attention raises UserError if it cannot replace the
    architecture's."""
    model.eval()  # without dropout, which needs the keys of a batch
    row = torch.zeros(1, 2, dtype=torch.long, device="meta")
    config = model.base.config.get_text_config()
    config._experts_implementation = "batched_mm"  # the default takes only bf16 on the meta device
    is_ours = config._attn_implementation == TRAINING_ATTENTION
    options = {"sequence_layout": SequenceLayout.from_lengths([[2]], 1, row.device)} if is_ours else {}
    # The second time with the descriptions of masks, which some architectures may not take.
    for context in (nullcontext(), comparing_masks()):
        try:
            with context:
                model.decoder(input_ids=row, position_ids=row, use_cache=False, **options)
        except UserError:
            raise
        except Exception:  # any class: architectures may use operations that the meta device does not support
            continue


def count_parameters(path: str, lora: LoraConfig | None, tensor: int = 1) -> ParameterCounts:
    """Count all and trained parameters of a model, or of the first rank's shard in a tensor-parallel group of `tensor`
    ranks, which no other rank's exceeds. With `lora`, only the adapters are trained. Zeros if the model cannot be read,
    which other checks report."""
    try:
        description = read_model(path)
        freeze_towers(description.empty)
        model: nn.Module = description.empty if lora is None else build_empty_adapted_model(path, lora)
        weights: dict[str, Tensor] = dict(model.named_parameters())
        if tensor > 1:
            slices = weight_slices(description.config, rank=0, size=tensor)
            weights = {name: piece.take(weights[piece.name]) for name, piece in slices.items()}
    except (UserError, OSError, ValueError):
        return ParameterCounts(0, 0)
    sizes = [(weight.numel(), weight.requires_grad) for weight in weights.values()]
    return ParameterCounts(sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained))


_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
"""Matches names of weights in decoder layers; those of vision and audio towers have other prefixes."""


def check_model_folder(path: str) -> None:
    """Check a local folder's configuration against the headers of its weights, without reading weights. Does nothing
    for a hub id. Raises UserError if the folder does not hold a complete causal language model."""
    folder = Path(path)
    if not folder.exists():
        check_on_hub(path, "model", "model.path: ", asks=False)
        return
    with reading("model.path", folder, "a model folder that can be read"):
        description = read_model(path)
        stored = description.stored
    _check_number_of_layers(path, description.config, stored)
    places, _ = find_places(description.empty, stored)
    shapes = {name: tensor.shape for name, tensor in stored.items() if not places[name].is_converted}
    check_shapes(path, description.empty, shapes)


def _check_number_of_layers(path: str, config: PretrainedConfig, names: Iterable[str]) -> None:
    """Compare the number of layers in config.json and in the weights: transformers would silently drop layers, or
    initialise missing ones at random."""
    text = config.get_text_config()
    # LongCat-Flash has two attentions per layer, and counts each in num_hidden_layers.
    expected = text.num_layers if text.model_type == "longcat_flash" else getattr(text, "num_hidden_layers", None)
    numbers = [int(match[1]) for name in names if (match := _LAYER.match(name))]
    if not numbers or not isinstance(expected, int):
        return
    num_layers = max(numbers) + 1
    num_mtp_layers = getattr(text, "num_nextn_predict_layers", None) or 0
    if num_layers not in (expected, expected + num_mtp_layers):
        raise make_config_error(
            path,
            f"num_hidden_layers: found {expected}, expected {num_layers}, the number of layers in the weights; "
            "configuration and weights are of different models",
        )


def check_architecture(settings: PlanSettings) -> None:
    """Raise UserError if the model's folder is incomplete or its architecture unsupported; reads no weights."""
    check_model_folder(settings.model.path)
    check_configuration(settings)


def check_configuration(settings: PlanSettings) -> None:
    """Raise UserError if training with these settings does not support the model's configuration; takes seconds for
    large models.

    A model that is not on this machine passes: `vcore-ds check` does not need it, and in a run the first rank downloads
    it.
    """
    path, model = settings.model.path, settings.model
    if (folder := find_folder(path)) is None:
        return
    if Path(path).name == CONFIG_NAME:  # `plan` also takes the file
        path = str(folder)
    config = read_model(path, local_files_only=True).config
    if model.provider == "megatron":
        from vcore_ds.models.megatron.model import transformer_config  # takes seconds to import

        transformer_config(path, config, tensor=settings.parallel.tensor, dtype=DTYPES[model.precision])
        return
    class_name, expert = find_causal_lm_class(config).__name__, settings.parallel.expert
    if model.gradient_checkpointing and not find_causal_lm_class(config).supports_gradient_checkpointing:
        raise UserError(
            f"model.gradient_checkpointing: found true together with model.path {path} ({class_name}), whose layers "
            "cannot be recomputed; expected false"
        )
    base = build_empty_model(path, config, attention=resolve_attention(config, model.attention))
    # The batch plan refuses dense models, and numbers of experts that `expert` does not divide.
    if expert > 1 and _has_routing(config) and not any(can_replace_experts(module) for module in base.modules()):
        raise UserError(
            f"parallel.expert: found {expert} together with model.path {path} ({class_name}), whose experts do not use "
            "transformers' experts interface, so they cannot be divided among ranks; expected 1"
        )
    with torch.device("meta"):
        adapted = TokenLossModel(base if settings.lora is None else add_lora(base, settings.lora))
    if settings.estimator is not None:  # after errors that its remedies would not mend
        check_estimator(path, config, settings.estimator)
    _call_decoder(adapted)
