"""A Hugging Face causal language model that returns the loss of every supervised token."""

from contextlib import AbstractContextManager, nullcontext

from peft import PeftModel
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from vcore_ds.data.batches import IGNORED_LABEL
from vcore_ds.errors import UserError
from vcore_ds.models.attention import OUR_ATTENTION, RowLayout
from vcore_ds.models.dropout import use_token_dropout
from vcore_ds.models.token_loss import token_entropy, token_loss

LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Config fields of architectures that transform logits after the head (Gemma 2, Cohere, Granite, Falcon-H1)."""


class TokenLossHead(nn.Module):
    """The output embedding, giving losses instead of logits.

    It must be a module that *owns* the weight: ZeRO-3 gathers a weight when the module that owns it runs, once for the
    forward and once for the backward, and an outside function would be handed an empty tensor. For tied embeddings
    the weight is the same `Parameter` as the input embedding's.
    """

    def __init__(self, output_embedding: nn.Linear):
        super().__init__()
        self.weight = output_embedding.weight
        self.bias = output_embedding.bias

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, *, with_entropies: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Losses `[N]` of `targets [N]` given `hidden [N, H]`; logits `[..., V]` where no targets are given.

        `with_entropies`: losses and entropies, both `[N]`.
        """
        if targets is None:
            return nn.functional.linear(hidden, self.weight, self.bias)
        losses = token_loss(hidden, self.weight, targets, self.bias)
        return (losses, token_entropy(hidden, self.weight, self.bias)) if with_entropies else losses


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
        transforms = [name for name in LOGIT_TRANSFORMS if getattr(base.config, name, None) not in (None, 1.0)]
        if transforms:
            raise UserError(
                f"{base.config.model_type}: this architecture changes its logits after the output embedding "
                f"({', '.join(transforms)}), which the token loss does not; choose a model without it"
            )
        head = base.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UserError(
                f"{base.config.model_type}: the output embedding is a {type(head).__name__}, expected a plain linear "
                "layer (LoRA on the output embedding is not supported)"
            )
        base.set_output_embeddings(TokenLossHead(head))

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
        return getattr(self.base, self.base.base_model_prefix)

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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Losses in nats, fp32, `[N]`: the supervised tokens among this rank's columns, in row-major order.

        Args:
            input_ids: `[b, t]`. No attention mask: under causal attention no real token sees the padding behind it.
            targets: `[b, t]`, the token that follows each; `IGNORED_LABEL` where it is not supervised.
            position_ids: `[b, t]`, from 0 in each sequence. Always given: a rank's columns need not begin a sequence.
            row_layout: which sequences the rows hold, and the sequence-parallel degree.
            with_entropies: also give the entropy of each token's prediction, `[N]`, without a graph.
        """
        # Hugging Face's own attention kernels know nothing of it, and tell packed sequences apart by their positions.
        is_ours = self.base.config._attn_implementation in OUR_ATTENTION
        if not is_ours and row_layout.sequence_parallel > 1:
            raise UserError(
                f"batch.sequence_parallel: found {row_layout.sequence_parallel} together with attention "
                f"{self.base.config._attn_implementation}; expected 1, or model.attention auto with an architecture "
                "whose attention can be replaced"
            )
        options = {"row_layout": row_layout} if is_ours else {}
        with save_on_cpu(pin_memory=input_ids.is_cuda) if self._activation_offload else nullcontext():
            hidden = self.decoder(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, **options
            ).last_hidden_state
        supervised = targets != IGNORED_LABEL
        head = self.base.get_output_embeddings()
        return head(hidden[supervised], targets[supervised], with_entropies=with_entropies)
