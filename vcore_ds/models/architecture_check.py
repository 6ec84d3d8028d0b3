"""What training refuses in a model's configuration, said before any weights are read.

The model is built as a run builds it, with its adapters and its token losses but without weights, and its decoder is
called once. So it is the code that would refuse in a run that refuses here, and `vcore-ds check`, `plan` and `train`
say the same.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from transformers import PretrainedConfig

from vcore_ds.common.errors import UserError
from vcore_ds.config.sections import LoraConfig
from vcore_ds.models.attention import TRAINING_ATTENTION, RowLayout
from vcore_ds.models.causal_lm import TokenLossModel, freeze_towers
from vcore_ds.models.configuration import can_replace_attention, causal_lm_class, read_config
from vcore_ds.models.experts import can_replace_experts
from vcore_ds.models.loading import attention_name
from vcore_ds.models.lora import add_lora
from vcore_ds.models.model_folder import build_empty_model
from vcore_ds.planning.memory import ParameterCounts
from vcore_ds.planning.model_shape import differences_refused, is_mixture

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
    """Raises UserError where training would refuse the model for its configuration; takes seconds for large models.

    Args:
        path: of the model, for messages.
        config: its configuration.
        attention: of the recipe, `auto` or one of Hugging Face's kernels.
        estimator: of the utilities; None for a method without them.
        expert: degree of expert parallelism.
    """
    if estimator is not None:
        check_estimator(path, config, estimator)
    name = attention_name(config, attention)
    base = build_empty_model(path, config, attention=name)
    # Of a dense model, and of experts that the degree does not divide, the plan of the batch says it.
    if expert > 1 and _has_routing(config) and not any(can_replace_experts(module) for module in base.modules()):
        raise UserError(
            f"parallel.expert: found {expert} together with model.path {path} ({causal_lm_class(config).__name__}), "
            "whose experts are the architecture's own code; expected 1: only experts that transformers computes "
            "through its interface for experts can be divided among ranks"
        )
    with torch.device("meta"):
        model = TokenLossModel(base if lora is None else add_lora(base, lora))
    _call_decoder(path, model)


def check_estimator(path: str, config: PretrainedConfig, estimator: Estimator) -> None:
    """Raises UserError where the estimator cannot give this architecture's utilities, with what can."""
    has_forward_mode = can_replace_attention(config)
    if estimator == "finite_difference" and has_forward_mode and _has_routing(config):
        raise UserError(differences_refused(path))
    if has_forward_mode or (estimator == "finite_difference" and not _has_routing(config)):
        return
    raise UserError(
        f"utility.estimator: found {estimator} together with model.path {path} ({causal_lm_class(config).__name__}), "
        f"whose attention cannot be replaced by one with a forward-mode derivative{suggest_alternative_to_jvp(config)}"
    )


def suggest_alternative_to_jvp(config: PretrainedConfig) -> str:
    """The end of a message that refuses `jvp` for this architecture: what serves instead."""
    if _has_routing(config):
        return (
            "; nor are finite differences right, since it is a mixture of experts, whose tokens they reroute; expected "
            f"{_WITHOUT_UTILITIES}"
        )
    return f"; expected {_DIFFERENCES}, {_WITHOUT_UTILITIES}"


def _has_routing(config: PretrainedConfig) -> bool:
    return is_mixture(config.get_text_config().to_dict())


def advise_on_noise(config: PretrainedConfig) -> str:
    """What to use where the noise of a finite difference is too large."""
    if can_replace_attention(config):
        return "Use utility.estimator=jvp, which has no epsilon and is right in this precision."
    return (
        "The attention of this architecture has no forward-mode derivative (jvp): use model.precision=fp32, "
        f"{_WITHOUT_UTILITIES}."
    )


def _call_decoder(path: str, model: TokenLossModel) -> None:
    """Lets the attention say what it cannot take the place of, and autograd what the architecture may not do to an
    input that requires a gradient, as embeddings below adapters do. Without dropout, whose masks are made for a
    batch."""
    model.eval()
    row = torch.zeros(1, 2, dtype=torch.long, device="meta")
    is_ours = model.base.config.get_text_config()._attn_implementation == TRAINING_ATTENTION
    options = {"row_layout": RowLayout.from_lengths([[2]], 1, row.device)} if is_ours else {}
    try:
        model.decoder(input_ids=row, position_ids=row, use_cache=False, **options)
    except UserError:
        raise
    except Exception as error:  # of any class: an operation of the architecture's own that does nothing without weights
        if "leaf Variable" in str(error):
            raise UserError(
                f"lora: found adapters together with model.path {path} ({type(model.base).__name__}), which changes "
                "its embeddings in place, so that no gradient reaches them; expected null (lora=null), or another model"
            ) from None


# How many parameters a model has, and how many of them are trained.


def count_parameters(path: str, lora: LoraConfig | None, tensor: int = 1) -> ParameterCounts:
    """The model's parameters, or a rank's part with tensor parallelism, from a model without weights; zeros
    where it cannot be read, which is said elsewhere.

    Args:
        path: of the model.
        lora: its adapters, which are then all that is trained.
        tensor: degree of tensor parallelism.
    """
    try:
        config = read_config(path)
        model = build_empty_model(path, config)
        weights = dict(model.named_parameters())
        freeze_towers(model)
        if lora is not None:
            with torch.device("meta"):
                adapted = add_lora(model, lora)
            weights |= {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        if tensor > 1:
            return _count_part(path, config, lora, tensor, weights)
    except (UserError, OSError, ValueError):
        return ParameterCounts(0, 0)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return ParameterCounts(sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained))


def _count_part(
    path: str, config: PretrainedConfig, lora: LoraConfig | None, tensor: int, weights: Mapping[str, torch.Tensor]
) -> ParameterCounts:
    """What the first rank of a tensor group has, which is as much as any.

    Args:
        weights: of the model by name, and of its adapters by their names in peft.
    """
    from vcore_ds.models.megatron.adapters import adapted_layers, adapter_pieces
    from vcore_ds.models.megatron.configuration import pieces

    place = dict(rank=0, size=tensor)
    num_base = sum(piece.of(weights[piece.name]).numel() for piece in pieces(config, **place).values())
    if lora is None:
        return ParameterCounts(num_base, num_base)
    added = adapter_pieces(adapted_layers(path, config, lora), config, lora, **place).values()
    num_trained = sum(piece.of(weights[piece.name]).numel() for piece in added)
    return ParameterCounts(num_base + num_trained, num_trained)
