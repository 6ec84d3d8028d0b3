"""Check whether training supports a model's architecture, before any weights are read; and count its parameters.

The model is built on the meta device as a run builds it, with adapters and token losses, and its decoder is called
once. So the same code raises here and in a run, and `vcore-ds check`, `plan` and `train` report the same errors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig

from vcore_ds.common.errors import UserError
from vcore_ds.config.sections import LoraConfig
from vcore_ds.models.attention import TRAINING_ATTENTION, SequenceLayout
from vcore_ds.models.causal_lm import TokenLossModel, freeze_towers
from vcore_ds.models.configuration import can_replace_attention, find_causal_lm_class, read_config
from vcore_ds.models.experts import can_replace_experts
from vcore_ds.models.loading import DTYPES, resolve_attention
from vcore_ds.models.lora import add_lora
from vcore_ds.models.model_folder import build_empty_model, check_model_folder
from vcore_ds.planning.known_models import is_on_disk
from vcore_ds.planning.model_shape import explain_refused_differences, is_moe
from vcore_ds.planning.passes import ParameterCounts
from vcore_ds.planning.settings import PlanSettings

Estimator = Literal["jvp", "finite_difference"]

_WITHOUT_UTILITIES = "another architecture, or a method without utilities (methods/sft.yaml)"
_DIFFERENCES = "finite_difference (utility.estimator=finite_difference utility.epsilon=auto)"


def check_architecture(
    path: str,
    config: PretrainedConfig,
    *,
    attention: str,
    lora: LoraConfig | None,
    estimator: Estimator | None,
    expert: int = 1,
) -> None:
    """Raise UserError if training would refuse the architecture; takes seconds for large models.

    Args:
        path: of the model, for messages.
        attention: `model.attention` of the recipe.
        lora: None for full fine-tuning.
        estimator: None for a method without utilities.
        expert: expert-parallel size.
    """
    if estimator is not None:
        check_estimator(path, config, estimator)
    base = build_empty_model(path, config, attention=resolve_attention(config, attention))
    # The batch plan refuses dense models, and numbers of experts that `expert` does not divide.
    if expert > 1 and _has_routing(config) and not any(can_replace_experts(module) for module in base.modules()):
        raise UserError(
            f"parallel.expert: found {expert} together with model.path {path} "
            f"({find_causal_lm_class(config).__name__}), whose experts do not use transformers' experts interface, so "
            "they cannot be divided among ranks; expected 1"
        )
    with torch.device("meta"):
        model = TokenLossModel(base if lora is None else add_lora(base, lora))
    _call_decoder(path, model)


def check_estimator(path: str, config: PretrainedConfig, estimator: Estimator) -> None:
    """Raise UserError if the estimator does not support this architecture, with an alternative."""
    has_forward_mode = can_replace_attention(config)
    if estimator == "finite_difference" and has_forward_mode and _has_routing(config):
        raise UserError(explain_refused_differences(path))
    if has_forward_mode or (estimator == "finite_difference" and not _has_routing(config)):
        return
    raise UserError(
        f"utility.estimator: found {estimator} together with model.path {path} "
        f"({find_causal_lm_class(config).__name__}), whose attention cannot be replaced by one with a forward-mode "
        f"derivative{suggest_alternative_to_jvp(config)}"
    )


def suggest_alternative_to_jvp(config: PretrainedConfig) -> str:
    """Return the end of a message that refuses `jvp`: the alternative for this architecture."""
    if _has_routing(config):
        return (
            "; finite differences are wrong too: they reroute the tokens of an MoE model between experts; expected "
            f"{_WITHOUT_UTILITIES}"
        )
    return f"; expected {_DIFFERENCES}, {_WITHOUT_UTILITIES}"


def _has_routing(config: PretrainedConfig) -> bool:
    return is_moe(config.get_text_config().to_dict())


def advise_on_noise(config: PretrainedConfig) -> str:
    """Return the advice for finite differences that are too noisy."""
    if can_replace_attention(config):
        return "Use utility.estimator=jvp, which has no epsilon and is accurate in this precision."
    return (
        "The attention of this architecture has no forward-mode derivative (jvp): use model.precision=fp32, "
        f"{_WITHOUT_UTILITIES}."
    )


def _call_decoder(path: str, model: TokenLossModel) -> None:
    """Call the decoder once on the meta device.

    Our attention raises UserError if it cannot replace the architecture's; autograd raises if the architecture changes
    its embeddings in place, since with adapters they require a gradient.
    """
    model.eval()  # without dropout, which needs the keys of a batch
    row = torch.zeros(1, 2, dtype=torch.long, device="meta")
    is_ours = model.base.config.get_text_config()._attn_implementation == TRAINING_ATTENTION
    options = {"sequence_layout": SequenceLayout.from_lengths([[2]], 1, row.device)} if is_ours else {}
    try:
        model.decoder(input_ids=row, position_ids=row, use_cache=False, **options)
    except UserError:
        raise
    except Exception as error:  # any class: architectures may use operations that the meta device does not support
        if "leaf Variable" in str(error):
            raise UserError(
                f"lora: found adapters together with model.path {path} ({type(model.base).__name__}), which changes "
                "its embeddings in place, so that no gradient reaches them; expected null (lora=null), or another model"
            ) from None


def count_parameters(path: str, lora: LoraConfig | None, tensor: int = 1) -> ParameterCounts:
    """Count all and trained parameters of a model, or of a rank's shard with tensor parallelism, on the meta device.

    Returns zeros if the model cannot be read, which other checks report. With `lora`, only the adapters are trained;
    `tensor` is the tensor-parallel size.
    """
    try:
        config = read_config(path)
        model = build_empty_model(path, config)
        weights = dict(model.named_parameters())
        freeze_towers(model)
        if lora is not None:
            with torch.device("meta"):
                add_lora(model, lora)
        if tensor > 1:
            return _count_tensor_shard(config, tensor, weights)
    except (UserError, OSError, ValueError):
        return ParameterCounts(0, 0)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return ParameterCounts(sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained))


def _count_tensor_shard(config: PretrainedConfig, tensor: int, weights: Mapping[str, torch.Tensor]) -> ParameterCounts:
    """Count the parameters of the first rank of a tensor-parallel group, which no other rank exceeds.

    `weights` are the model's by name.
    """
    from vcore_ds.models.megatron.configuration import weight_slices

    slices = weight_slices(config, rank=0, size=tensor).values()
    number = sum(piece.take(weights[piece.name]).numel() for piece in slices)
    return ParameterCounts(number, number)


def check_model(settings: PlanSettings) -> None:
    """Raise UserError if the model's folder is incomplete or its architecture unsupported; reads no weights."""
    check_model_folder(settings.model.path)
    check_configuration(settings)


def check_configuration(settings: PlanSettings) -> None:
    """Raise UserError if training with these settings does not support the model's configuration.

    A model that is not on this machine passes: `vcore-ds check` does not need it, and in a run the first rank downloads
    it.
    """
    path = settings.model.path
    if not is_on_disk(path):
        return
    if Path(path).name == "config.json":  # `plan` also takes the file
        path = str(Path(path).parent)
    if settings.model.provider == "huggingface":
        config = read_config(path, local_files_only=True)
        check_architecture(
            path,
            config,
            attention=settings.model.attention,
            lora=settings.lora,
            estimator=settings.estimator,
            expert=settings.parallel.expert,
        )
        causal_lm = find_causal_lm_class(config)
        if settings.model.gradient_checkpointing and not causal_lm.supports_gradient_checkpointing:
            raise UserError(
                f"model.gradient_checkpointing: found true together with model.path {path} ({causal_lm.__name__}), "
                "whose layers cannot be recomputed; expected false"
            )
        return
    from vcore_ds.models.megatron.configuration import transformer_config

    dtype = DTYPES[settings.model.precision]
    transformer_config(path, read_config(path), tensor=settings.parallel.tensor, dtype=dtype)
