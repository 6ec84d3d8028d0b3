"""The few numbers of a model on which time and memory of a batch depend, from its config.json without transformers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Architectures have a dozen names for the same five numbers of their experts; transformers has no common one.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")


@dataclass(frozen=True)
class Experts:
    """The routed experts of a decoder, gated MLPs of one width."""

    num_layers: int  # layers that have them; the others have a dense MLP
    num_experts: int  # E, of each of these layers
    per_token: int  # k, experts that a token goes through
    width: int  # W, of one expert
    # S, width of the MLP that all tokens of these layers pass through in addition: shared experts, or a dense MLP
    shared_width: int = 0

    @property
    def active_width(self) -> int:
        """Width of the MLP that a token goes through."""
        return self.per_token * self.width + self.shared_width


def is_moe(config: Mapping[str, Any]) -> bool:
    """Whether a language model's configuration, as in config.json, is that of an MoE model: the parameters themselves
    decide which of them a token passes through."""
    # Gemma 4 and Doge have dense models of the same class.
    is_off = config.get("enable_moe_block") is False or config.get("is_moe") is False
    return not is_off and (_read_number(config, _NUM_EXPERTS) or 0) > 1


def read_experts(config: Mapping[str, Any], num_layers: int) -> Experts | None:
    """Read the routed experts of a decoder with `num_layers` layers; None for a dense one, and where no width is given.
    `config`: as in `make_shape`."""
    num_experts, width = _read_number(config, _NUM_EXPERTS), _read_number(config, _WIDTH)
    if not is_moe(config) or num_experts is None or width is None:
        return None
    per_token = min(num_experts, _read_number(config, _PER_TOKEN) or 1)
    shared = _read_number(config, _SHARED_WIDTH) or (_read_number(config, _NUM_SHARED) or 0) * width
    if "intermediate_size_mlp" in config:  # Llama 4 has one shared expert, and says so nowhere
        shared = width
    if config.get("enable_moe_block") is True:  # Gemma 4 has experts beside the dense MLP
        shared = _read_number(config, ("intermediate_size",)) or 0
    return Experts(_count_moe_layers(config, num_layers), num_experts, per_token, width, shared)


def _count_moe_layers(config: Mapping[str, Any], num_layers: int) -> int:
    """Count the MoE layers, from an explicit list or a stride."""
    for name, dense in (("mlp_layer_types", "dense"), ("moe_layer_freq", 0)):
        kinds = config.get(name)
        if isinstance(kinds, list | tuple) and len(kinds) == num_layers:
            return sum(kind != dense for kind in kinds)
    first = _read_number(config, ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")) or 0
    step = _read_number(config, ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")) or 1
    offset = step - 1
    if (period := _read_number(config, ("expert_layer_period",))) is not None:  # Jamba
        step, offset = period, _read_number(config, ("expert_layer_offset",)) or 0
    dense_layers = config.get("mlp_only_layers")
    dense_layers = dense_layers if isinstance(dense_layers, list | tuple) else ()
    return sum(i % step == offset % step and i not in dense_layers for i in range(first, num_layers))


def _read_number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Read the first of these keys that is a natural number; a list with one for each layer counts as its largest."""
    mlp = config.get("ffn_config")  # DBRX keeps them there
    config = {**config, **mlp} if isinstance(mlp, dict) else config
    for name in names:
        value = config.get(name)
        if isinstance(value, list | tuple) and value and all(type(number) is int for number in value):
            value = max(value)
        if type(value) is int and 0 < value < 2**31:
            return value
    return None


SIZE_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary_size": ("vocab_size",),
}
"""Names of a size in config.json, by architecture; the first is transformers' own for all of them."""

_NORMALIZED_HEADS = ("qwen3", "olmo2", "olmo3", "gemma3")  # prefixes of architectures that normalise queries and keys

COUNTED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Architectures whose activations are counted exactly (tests/unit/test_memory.py): those of others may take a fifth
more than the estimate."""

_OTHER_NORMS = (
    "gemma",
    "olmo",
    "flex_olmo",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "gpt2",
    "gpt_neox",
    "phi",
    "falcon",
    "opt",
)
"""Prefixes of architectures whose norms are not computed by Llama's code; others are taken to be Llama-like."""

_FOUR_NORMS = re.compile(r"gemma[234]|glm4(?!.*moe)")  # architectures that also normalise outputs of attention and MLP

# Fields that change logits, from `*ForCausalLM.forward` and `*ForConditionalGeneration.forward` of transformers 5.23; a
# test reads those again.
FACTORS = ("logit_scale", "lm_head_multiplier")  # Cohere; Falcon-H1
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")  # of logits or hidden states: Granite, MiniCPM3; Inkling
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma; RecurrentGemma; xLSTM
LOGIT_TRANSFORMS = (*FACTORS, *DIVISORS, *SOFTCAPS, "dim_model_base")  # from the last MiniCPM3 computes its divisor
PLAIN_LOGITS = ("gemma3", "mpt")  # architectures that have such fields, but ignore them

REQUIRED_SIZES = ("num_layers", "num_heads", "hidden_size")


@dataclass(frozen=True)
class ModelShape:
    """A decoder, as far as the time and the memory of a pass over it go."""

    num_layers: int
    num_heads: int  # query heads, A
    num_kv_heads: int  # K; a divisor of A
    head_dim: int  # D
    # P, parameters of the linear layers of one decoder layer that a token goes through; in an MoE model their
    # mean over the layers, without the experts to which it is not routed
    layer_parameters: int
    # Why sequence parallelism is not possible, such as `whose attention cannot be replaced`; None where it is
    no_sequence_parallelism: str | None = None
    unpackable: str | None = None  # why sequences cannot be packed, in the same form; None where they can
    # Kind of the rotary embedding where its frequencies depend on the largest position in a forward
    rope: str = "default"
    rope_limit: int | None = None  # tokens of a sequence up to which they do not; None where they never do
    is_alone: bool = False  # whether each sequence needs a separate forward
    is_assumed: bool = False  # the model was not there to be read, and this is another one's shape
    hidden_size: int = 0  # H; 0 where the sizes that memory depends on are unknown
    intermediate_size: int = 0  # F, width of the MLP
    vocabulary_size: int = 0  # V, rows of the embeddings
    is_tied: bool = False  # whether input and output embedding are one parameter
    normalizes_heads: bool = False  # whether queries and keys are normalised, as in Qwen3
    # Whether norms and gated MLPs are those of Llama, which keep little for the backward (`models/pointwise.py`)
    has_llama_norms: bool = True
    norms_per_layer: int = 2  # norms of hidden states
    has_plain_logits: bool = True  # whether logits are hidden states times the head's weight, neither scaled nor capped
    is_counted: bool = True  # whether tests compare the memory of a layer's activations with what autograd saves
    experts: Experts | None = None  # None for a dense model
    # Tokens of the longest sequence that the model was made for; None where its configuration does not say
    max_positions: int | None = None

    def take_tensor_shard(self, size: int) -> "ModelShape":
        """Return the shape of a rank's shard in a tensor-parallel group of `size` ranks. A vocabulary that the group
        does not divide is padded."""
        if size == 1:
            return self
        divided = ("num_heads", "num_kv_heads", "layer_parameters", "intermediate_size")
        rows = -(-self.vocabulary_size // size)
        parts: dict[str, Any] = {name: max(1, getattr(self, name) // size) for name in divided}
        if (experts := self.experts) is not None:
            widths = {"width": experts.width // size, "shared_width": experts.shared_width // size}
            parts["experts"] = replace(experts, **widths)
        return replace(self, **parts, vocabulary_size=rows)

    def adapt_to_length(self, longest: int) -> "ModelShape":
        """Return the shape for data whose longest sequence has `longest` tokens. Where one sequence makes the rotary
        embedding change its frequencies, another one in the same forward would be rotated by these too, and a rank that
        has only the first tokens of a sequence by others than the rest."""
        if self.rope_limit is None or longest <= self.rope_limit:
            return self
        why = f"whose rotary embedding ({self.rope}) depends on the largest position in a forward"
        return replace(self, no_sequence_parallelism=why, unpackable=why, is_alone=True)

    @property
    def idle_layer_parameters(self) -> int:
        """Parameters of the experts of an MoE layer to which a token is not routed; 0 in a dense model."""
        if (experts := self.experts) is None:
            return 0
        return 3 * self.hidden_size * experts.width * (experts.num_experts - experts.per_token)

    @property
    def idle_parameters(self) -> int:
        """The same of all layers."""
        return 0 if self.experts is None else self.experts.num_layers * self.idle_layer_parameters

    @property
    def expert_layer_parameters(self) -> int:
        """Parameters of all routed experts of an MoE layer; 0 in a dense model."""
        return 0 if self.experts is None else 3 * self.hidden_size * self.experts.num_experts * self.experts.width

    @property
    def expert_parameters(self) -> int:
        """The same of all layers."""
        return 0 if self.experts is None else self.experts.num_layers * self.expert_layer_parameters

    def remote_expert_parameters(self, expert: int) -> int:
        """Expert parameters held by the other ranks of an expert-parallel group."""
        return self.expert_parameters - self.expert_parameters // expert

    def list_weight_matrices(self, *, active: bool = False) -> list[tuple[int, int, int]]:
        """List the weight matrices of a Llama-like model of this shape: the number of each kind, its rows and columns.
        `active`: only those that a token is multiplied by, so without input embedding and idle experts."""
        embeddings = (1 if self.is_tied or active else 2, self.vocabulary_size, self.hidden_size)
        return [*self.list_hidden_matrices(active=active), embeddings]

    def list_hidden_matrices(self, *, active: bool = False) -> list[tuple[int, int, int]]:
        """List the weight matrices without embeddings, which Muon updates; as in `list_weight_matrices`."""
        hidden, experts = self.hidden_size, self.experts
        num_dense = self.num_layers if experts is None else self.num_layers - experts.num_layers
        matrices = [
            (2 * self.num_layers, self.num_heads * self.head_dim, hidden),
            (2 * self.num_layers, self.num_kv_heads * self.head_dim, hidden),
            (3 * num_dense, self.intermediate_size, hidden),
        ]
        if experts is not None:
            num_experts = experts.per_token if active else experts.num_experts
            matrices.append((3 * experts.num_layers * num_experts, experts.width, hidden))
            matrices.append((3 * experts.num_layers, experts.shared_width, hidden))
        return [(number, rows, columns) for number, rows, columns in matrices if number * rows * columns > 0]

    @property
    def attention_length(self) -> float:
        """Tokens of a sequence whose causal attention costs as much as its linear layers, P / (A D).

        A token at position t needs 4 t FLOP per head dimension, on average half of that over a sequence; and 2 per
        linear parameter of a layer.
        """
        return self.layer_parameters / (self.num_heads * self.head_dim)


def make_shape(sizes: Mapping[str, int | None], config: Mapping[str, Any]) -> ModelShape | None:
    """Make the shape of a decoder, Llama-like except for its experts, latent and linear attention; None where one of
    `REQUIRED_SIZES` is missing. `sizes`: those of `SIZE_NAMES`, None where the configuration has none; `config`: of the
    language model, as in config.json; malformed values are ignored."""
    num_layers, num_heads, hidden = (sizes[key] for key in REQUIRED_SIZES)
    if num_layers is None or num_heads is None or hidden is None:
        return None
    num_kv_heads, head_dim = sizes["num_kv_heads"] or num_heads, sizes["head_dim"] or max(1, hidden // num_heads)
    attention = _count_attention_parameters(hidden, num_heads, num_kv_heads, head_dim)
    if (latent := _read_latent_attention(config, hidden, num_heads)) is not None:
        num_kv_heads, (head_dim, attention) = num_heads, latent
    attention = _count_mixer_parameters(config, num_layers, hidden, num_heads * head_dim, attention)
    width, vocabulary = sizes["intermediate_size"] or 4 * hidden, sizes["vocabulary_size"]
    mlp = num_layers * 3 * width
    if (experts := read_experts(config, num_layers)) is not None:
        width = _read_number(config, ("intermediate_size_mlp", "intermediate_size")) or experts.active_width
        mlp = experts.num_layers * (3 * experts.active_width + experts.num_experts)  # with the router
        mlp += (num_layers - experts.num_layers) * 3 * width
    model_type, unpackable = str(config.get("model_type", "")), _explain_unpackable(config)
    return ModelShape(
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        attention + hidden * mlp // num_layers,
        unpackable,
        unpackable,
        *_find_rope(config),
        hidden_size=0 if vocabulary is None else hidden,
        intermediate_size=width,
        vocabulary_size=vocabulary or 0,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        normalizes_heads=model_type.startswith(_NORMALIZED_HEADS),
        has_llama_norms=not model_type.startswith(_OTHER_NORMS),
        norms_per_layer=4 if _FOUR_NORMS.match(model_type) else 2,
        has_plain_logits=model_type in PLAIN_LOGITS or all(config.get(name) in (None, 1) for name in LOGIT_TRANSFORMS),
        is_counted=model_type in COUNTED,
        experts=experts,
        max_positions=_read_max_positions(config),
    )


def _read_max_positions(config: Mapping[str, Any]) -> int | None:
    """Read the positions of the embeddings, or those to which YaRN extends them."""
    positions = _read_number(config, ("max_position_embeddings", "n_positions"))
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if positions is None or not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
        return positions
    factor, trained = rope.get("factor"), _read_number(rope, ("original_max_position_embeddings",)) or positions
    return max(positions, int(factor * trained)) if isinstance(factor, int | float) else positions


def layer_parameters(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, intermediate_size: int) -> int:
    """Linear parameters of a dense, Llama-like layer, for which other architectures are taken."""
    attention = _count_attention_parameters(hidden_size, num_heads, num_kv_heads, head_dim)
    return attention + 3 * hidden_size * intermediate_size


def _count_attention_parameters(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    return 2 * hidden_size * head_dim * (num_heads + num_kv_heads)


def _read_latent_attention(config: Mapping[str, Any], hidden: int, num_heads: int) -> tuple[int, int] | None:
    """Read the head dimension of queries and keys, and the parameters, of multi-head latent attention (DeepSeek-V2 and
    V3), which computes a key and a value for each query head from what all heads share; None for other attention."""
    sizes: list[Any] = [
        config.get(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ]
    if any(type(size) is not int for size in sizes):
        return None
    shared, nope, rope, value = sizes
    query_rank, head_dim = config.get("q_lora_rank"), nope + rope
    query = hidden * num_heads * head_dim
    if type(query_rank) is int:
        query = query_rank * (hidden + num_heads * head_dim)
    return head_dim, query + hidden * (shared + rope) + num_heads * (shared * (nope + value) + value * hidden)


def _count_mixer_parameters(
    config: Mapping[str, Any], num_layers: int, hidden: int, query_size: int, attention: int
) -> int:
    """Count the parameters of a layer's token mixer, mean over the layers, where most are gated delta nets (Qwen3-Next,
    Qwen3.5); else those of its attention. Time and memory of these layers are counted as if they were attention."""
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
    if any(type(config.get(name)) is not int for name in names):
        return attention
    key_heads, key_dim, value_heads, value_dim = (config[name] for name in names)
    kinds, interval = config.get("layer_types"), config.get("full_attention_interval") or 4
    num_full = num_layers // interval if type(interval) is int else 0
    if isinstance(kinds, list | tuple):
        num_full = sum(kind == "full_attention" for kind in kinds)
    keys, values = key_heads * key_dim, value_heads * value_dim
    linear = hidden * (2 * keys + 3 * values + 2 * value_heads)
    full = attention + hidden * query_size  # its output is gated
    return (num_full * full + (num_layers - num_full) * linear) // num_layers


# Obstacles to packs, and to several sequences in one forward, as far as config.json names them.
#
# In doubt sequences are not packed: with padding on the right, losses are right for every causal model.

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "moe", "dense", "sparse", "mlp"})
"""Kinds of layers (`layer_types`) in which tokens see each other through attention that can be replaced, and no other
way; all other kinds may carry a state from one sequence of a pack to the next. The last four say what follows the
attention."""

OTHER_LAYERS = frozenset({"conv", "linear_attention", "hybrid", "hybrid_sliding"})
"""Kinds in which they also, or only, do so through code of the model's own: convolutions, recurrences."""

_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
"""Names of the list of layer kinds in config.json, by architecture."""

_WORDS_OF_OTHER_LAYERS = frozenset({"mamba", "ssm", "conv", "conv1d"})
"""Words in the names of sizes that only convolutions and recurrences have. Jamba, Bamba, Nemotron-H and Falcon-H1 do
not write down the kinds of their layers, but all of them write down such a size."""

_ROPE_OF_THE_FORWARD = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
"""Kinds of rotary embedding whose frequencies depend on the largest position in a forward, padding and other sequences
included, and the key of the position up to which they do not."""


def _explain_unpackable(config: Mapping[str, Any]) -> str | None:
    """Explain why sequences cannot be packed, as far as the layers go; None where they can."""
    if any(name.startswith("index_topk") and value for name, value in config.items()):
        return "whose attention selects keys by their place in the pack"
    for name in _LAYER_LISTS:
        layers = config.get(name)
        if isinstance(layers, list | tuple) and layers:
            others = sorted({str(kind) for kind in layers} - ATTENTION_LAYERS)
            return f"whose layers ({', '.join(others)}) are not all attention" if others else None
    sizes = [name for name, value in config.items() if value and _WORDS_OF_OTHER_LAYERS.intersection(name.split("_"))]
    return f"whose layers are not all attention (it has {min(sizes)})" if sizes else None


def _find_rope(config: Mapping[str, Any]) -> tuple[str, int | None]:
    # For the model, or for each kind of layer; under another name before transformers 5.
    sections = [part for part in (config.get("rope_parameters"), config.get("rope_scaling")) if isinstance(part, dict)]
    sections += [part for section in sections for part in section.values() if isinstance(part, dict)]
    for part in sections:
        kind = part.get("rope_type", part.get("type"))
        if isinstance(kind, str) and kind in _ROPE_OF_THE_FORWARD:
            name = _ROPE_OF_THE_FORWARD[kind]
            limit = part.get(name, config.get(name, config.get("max_position_embeddings")))
            return kind, limit if isinstance(limit, int) else 0
    return "default", None
