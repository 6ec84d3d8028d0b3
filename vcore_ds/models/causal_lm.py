"""A Hugging Face causal language model that returns the loss of every supervised token."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from peft import PeftModel
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import supervised_tokens
from vcore_ds.models.attention import OUR_ATTENTION, RowLayout
from vcore_ds.models.dropout import use_token_dropout
from vcore_ds.models.dual_tensors import read_low_rank_tangent
from vcore_ds.models.token_loss import (
    LogitTransform,
    VocabularyShard,
    compute_raw_logits,
    token_entropy,
    token_loss,
)

# The language model of a Hugging Face model: its decoder, and what it does to the products with its output embedding.
#
# Read off `*ForCausalLM.forward` and `*ForConditionalGeneration.forward` of transformers 5.23; a test reads them
# again.


FACTORS = ("logit_scale", "lm_head_multiplier")
"""Fields by which logits are multiplied (Cohere; Falcon-H1)."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Fields by which logits, or the hidden states they are made of, are divided (Granite, MiniCPM3; Inkling)."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Fields with the bound of capped logits (Gemma; RecurrentGemma; xLSTM)."""


def is_vision_language(config: PretrainedConfig) -> bool:
    """Whether the language model is one of the parts of the model, with a configuration of its own."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.get_text_config() is not config


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """What opens the whole model. Of a vision-language model, the class for causal language models opens the language
    model alone, or nothing."""
    return AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM


def read_logit_transform(config: PretrainedConfig) -> LogitTransform:
    """What the architecture does to its logits."""
    if config.model_type in ("gemma3", "mpt"):  # have such fields, and do not read them
        return LogitTransform()
    text = config.get_text_config()
    factor, divisor, softcap = (_declared(text, names) for names in (FACTORS, DIVISORS, SOFTCAPS))
    if text.model_type == "hyperclovax":  # its field of Granite's name is a factor
        factor, divisor = divisor, None
    return LogitTransform((factor or 1.0) / (divisor or 1.0), softcap)


def _declared(config: PretrainedConfig, names: tuple[str, ...]) -> float | None:
    """Value of the one of the fields that the architecture has. A config.json may hold others, which nothing reads."""
    return next((getattr(config, name) for name in names if hasattr(type(config), name)), None)


def unpadded_vocabulary(config: PretrainedConfig) -> int | None:
    """Rows of the output embedding that are tokens, where the rest have no probability (Inkling); None for all."""
    return getattr(config.get_text_config(), "unpadded_vocab_size", None)


def decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its head: token ids to hidden states. Of a vision-language model, the language model's."""
    found = model.get_decoder()
    if found is model.get_output_embeddings():  # which ModernBERT's decoder calls `decoder`
        return model.base_model
    # Where the architecture calls it by none of the names that transformers looks for (Llama 4), it gives the model
    # with the head.
    return found.model if hasattr(found, "lm_head") else found


def freeze_towers(model: PreTrainedModel) -> None:
    """Freezes what is neither decoder nor head, in place: no text goes through it."""
    used = {id(p) for part in (decoder(model), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


class TokenLossHead(nn.Module):
    """The output embedding, giving losses instead of logits.

    It must be a module that *owns* the weight: ZeRO-3 gathers a weight when the module that owns it runs, once for the
    forward and once for the backward, and an outside function would be handed an empty tensor. For tied embeddings
    the weight is the same `Parameter` as the input embedding's.
    """

    def __init__(self, output_embedding: nn.Linear, transform: LogitTransform, num_tokens: int | None):
        """Args:
        output_embedding: its parameters become this module's.
        transform: what the architecture does to the products with it.
        num_tokens: rows that are tokens, where the rest are padding; None for all.
        """
        super().__init__()
        self.weight = output_embedding.weight
        self.bias = output_embedding.bias
        self._transform = transform
        self._part = None if num_tokens is None else VocabularyShard(0, num_tokens, lambda own: own[None])

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, *, with_entropies: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Losses `[N]` of `targets [N]` given `hidden [N, H]`; where no targets are given the products `[..., V]`, of
        which the architecture's own forward makes logits, in the precision in which the loss has them.

        `with_entropies`: losses and entropies, both `[N]`.
        """
        if targets is None:
            return compute_raw_logits(hidden.flatten(0, -2), self.weight, self.bias).unflatten(0, hidden.shape[:-1])
        transform, part = self._transform, self._part
        losses = token_loss(
            hidden,
            self.weight,
            targets,
            self.bias,
            transform=transform,
            part=part,
            weight_tangent=read_low_rank_tangent(self, "weight"),
        )
        if not with_entropies:
            return losses
        return losses, token_entropy(hidden, self.weight, self.bias, transform=transform, part=part)


class TokenLossModel(nn.Module):
    """Wraps a (possibly LoRA-adapted) causal LM; `forward` gives the loss of each supervised token.

    Logits are computed at supervised positions only. `causal_lm` is a `PreTrainedModel` or a `PeftModel` around one.
    """

    def __init__(self, causal_lm: PreTrainedModel | PeftModel, *, activation_offload: bool = False):
        """`activation_offload`: keep what the backward needs of the decoder, with activation checkpoints the input of
        each layer, in host memory until then."""
        super().__init__()
        self.causal_lm: PreTrainedModel | PeftModel = causal_lm
        self._activation_offload = activation_offload
        use_token_dropout(causal_lm)
        base = self.base
        head = base.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UserError(
                f"{base.config.model_type}: the output embedding is a {type(head).__name__}, expected a plain linear "
                "layer (LoRA on the output embedding is not supported)"
            )
        config = base.config
        base.set_output_embeddings(TokenLossHead(head, read_logit_transform(config), unpadded_vocabulary(config)))

    @property
    def base(self) -> PreTrainedModel:
        """The Hugging Face model without the adapter's wrapper."""
        if not isinstance(self.causal_lm, PeftModel):
            return self.causal_lm
        base = self.causal_lm.get_base_model()
        assert isinstance(base, PreTrainedModel)
        return base

    @property
    def decoder(self) -> nn.Module:
        """The model without its head: token ids to hidden states."""
        return decoder(self.base)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order, of whichever classes; empty where the architecture marks none."""
        layers: list[nn.Module] = []
        inside: set[nn.Module] = set()
        for module in self.decoder.modules():
            if isinstance(module, GradientCheckpointingLayer) and module not in inside:
                layers.append(module)
                inside.update(module.modules())
        return layers

    def without_adapters(self) -> AbstractContextManager[None]:
        """A context in which the layers compute without their adapters."""
        assert isinstance(self.causal_lm, PeftModel)
        return self.causal_lm.disable_adapter()

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        position_ids: Tensor,
        row_layout: RowLayout,
        *,
        with_entropies: bool = False,
        own_logits: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Losses in nats, fp32, `[N]`: the supervised tokens among this rank's columns, in row-major order.

        Args:
            input_ids: `[b, t]`. No attention mask: under causal attention no real token sees the padding behind it.
            targets: `[b, t]`, the token that follows each; `IGNORED_LABEL` where it is not supervised. On the host.
            position_ids: `[b, t]`, from 0 in each sequence. Always given: a rank's columns need not begin a sequence.
            row_layout: which sequences the rows hold, and the sequence-parallel degree.
            with_entropies: also give the entropy of each token's prediction, `[N]`, without a graph.
            own_logits: give the logits `[b, t, V]` of the architecture's own forward instead, with its own attention
                and mask, of unpacked sequences; it may do more than the decoder and the output embedding. A part of
                this forward, since ZeRO-3 gathers within it.
        """
        if own_logits:
            with _own_attention(self.base.config.get_text_config()):
                return self.causal_lm(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        # Hugging Face's own attention kernels know nothing of it, and tell packed sequences apart by their positions.
        attention = self.base.config.get_text_config()._attn_implementation
        is_ours = attention in OUR_ATTENTION
        if not is_ours and row_layout.sequence_parallel > 1:
            raise UserError(
                f"batch.sequence_parallel: found {row_layout.sequence_parallel} together with attention "
                f"{attention}; expected 1, or model.attention auto with an architecture whose attention can be replaced"
            )
        options = {"row_layout": row_layout} if is_ours else {}
        with save_on_cpu(pin_memory=input_ids.is_cuda) if self._activation_offload else nullcontext():
            hidden = self.decoder(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, **options
            ).last_hidden_state
        head = self.base.get_output_embeddings()
        return head(*supervised_tokens(hidden, targets), with_entropies=with_entropies)


@contextmanager
def _own_attention(config: PretrainedConfig) -> Iterator[None]:
    """A context in which the decoder with this configuration runs transformers' eager attention in place of ours, which
    makes transformers build the architecture's mask."""
    before = config._attn_implementation
    if before in OUR_ATTENTION:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = before
