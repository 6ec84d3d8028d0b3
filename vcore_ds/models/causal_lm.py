"""A Hugging Face causal language model that returns the loss of every supervised token."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from peft import PeftModel
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from vcore_ds.data.batches import supervised_tokens
from vcore_ds.errors import UserError
from vcore_ds.models.attention import OUR_ATTENTION
from vcore_ds.models.dropout import use_token_dropout
from vcore_ds.models.dual_numbers import low_rank_tangent
from vcore_ds.models.language_model import decoder, logit_transform, unpadded_vocabulary
from vcore_ds.models.row_layout import RowLayout
from vcore_ds.models.token_loss import (
    LogitTransform,
    VocabularyPart,
    token_entropy,
    token_loss,
    token_products,
)


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
        self._part = None if num_tokens is None else VocabularyPart(0, num_tokens, lambda own: own[None])

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, *, with_entropies: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Losses `[N]` of `targets [N]` given `hidden [N, H]`; where no targets are given the products `[..., V]`, of
        which the architecture's own forward makes logits, in the precision in which the loss has them.

        `with_entropies`: losses and entropies, both `[N]`.
        """
        if targets is None:
            return token_products(hidden.flatten(0, -2), self.weight, self.bias).unflatten(0, hidden.shape[:-1])
        transform, part = self._transform, self._part
        losses = token_loss(
            hidden,
            self.weight,
            targets,
            self.bias,
            transform=transform,
            part=part,
            weight_tangent=low_rank_tangent(self, "weight"),
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
        base.set_output_embeddings(TokenLossHead(head, logit_transform(config), unpadded_vocabulary(config)))

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
