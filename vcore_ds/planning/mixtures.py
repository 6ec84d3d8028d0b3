"""The experts of a mixture, read from its configuration: how many there are, how many a token goes through, how wide.

Architectures have a dozen names for the same five numbers; transformers has no common one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)


@dataclass(frozen=True)
class Experts:
    """The routed experts of a decoder, gated MLPs of one width."""

    num_layers: int
    """Layers that have them; the others have a dense MLP."""
    num_experts: int
    """E, of each of these layers."""
    per_token: int
    """k, experts that a token goes through."""
    width: int
    """W, of one expert."""
    shared_width: int = 0
    """S, of what all tokens of these layers go through beside them: shared experts together, or a dense MLP."""

    @property
    def active_width(self) -> int:
        """Width of the MLP that a token goes through."""
        return self.per_token * self.width + self.shared_width

    @property
    def idle_width(self) -> int:
        """Width of all experts of a layer that a token does not go through."""
        return (self.num_experts - self.per_token) * self.width


SPREAD_OF_EXPERTS = 0.25
"""Standard deviation of the tokens of a layer's experts, over their mean. Assumed: a run measures the load of the
fullest expert (docs/tracking.md)."""


def fullest_rank(num_experts: int, num_ranks: int) -> float:
    """Tokens that the fullest of the ranks that divide a layer's experts is sent, over their mean; an assumption.

    A rank has the sum of `num_experts / num_ranks` experts, whose loads are taken for independent, and the largest of
    n normal numbers lies about `sqrt(2 ln n)` deviations above their mean.
    """
    return 1 + SPREAD_OF_EXPERTS * math.sqrt(2 * math.log(num_ranks) * num_ranks / num_experts)


def differences_refused(path: str) -> str:
    """Why no finite difference is taken on a mixture, for a recipe that asks for one."""
    return (
        f"utility.estimator: found finite_difference together with model.path {path}, a mixture of experts: the "
        "perturbation sends tokens to other experts, and the jumps of their losses are taken for utility; expected jvp "
        "(utility.estimator=jvp utility.epsilon=null), or a method without utilities (methods/sft.yaml)"
    )


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Whether a language model's configuration, as in config.json, is that of a mixture of experts: which parameters
    a token goes through depends on the parameters."""
    # Gemma 4 and Doge have dense models of the same class.
    is_off = config.get("enable_moe_block") is False or config.get("is_moe") is False
    return not is_off and (_number(config, _NUM_EXPERTS) or 0) > 1


def experts_of(config: Mapping[str, Any], num_layers: int) -> Experts | None:
    """The experts of a language model; None for a dense one, and where no width is given.

    Args:
        config: of the language model, as in config.json; what is malformed is passed over.
        num_layers: of the decoder.
    """
    num_experts, width = _number(config, _NUM_EXPERTS), _number(config, _WIDTH)
    if not is_mixture(config) or num_experts is None or width is None:
        return None
    per_token = min(num_experts, _number(config, _PER_TOKEN) or 1)
    shared = _number(config, _SHARED_WIDTH) or (_number(config, _NUM_SHARED) or 0) * width
    if "intermediate_size_mlp" in config:  # Llama 4 has one shared expert, and says so nowhere
        shared = width
    if config.get("enable_moe_block") is True:  # Gemma 4 has experts beside the dense MLP
        shared = _number(config, ("intermediate_size",)) or 0
    return Experts(_num_sparse_layers(config, num_layers), num_experts, per_token, width, shared)


def dense_width(config: Mapping[str, Any]) -> int | None:
    """Width of the MLP in the layers without experts."""
    return _number(config, ("intermediate_size_mlp", "intermediate_size"))


def _num_sparse_layers(config: Mapping[str, Any], num_layers: int) -> int:
    """Layers with experts, from a list of all layers or from a rule."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list | tuple) and len(kinds) == num_layers:
        return sum(kind != "dense" for kind in kinds)
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list | tuple) and len(frequency) == num_layers:
        return sum(bool(one) for one in frequency)
    first = _number(config, ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")) or 0
    step = _number(config, ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")) or 1
    offset = step - 1
    if (period := _number(config, ("expert_layer_period",))) is not None:  # Jamba
        step, offset = period, _number(config, ("expert_layer_offset",)) or 0
    dense = config.get("mlp_only_layers") or ()
    dense = dense if isinstance(dense, list | tuple) else ()
    return sum(i % step == offset % step and i not in dense for i in range(first, num_layers))


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these that is a natural number; a list with one for each layer counts as its largest."""
    mlp = config.get("ffn_config")  # DBRX keeps them there
    config = {**config, **mlp} if isinstance(mlp, dict) else config
    for name in names:
        value = config.get(name)
        if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
            value = max(value)
        if type(value) is int and 0 < value < 2**31:
            return value
    return None
