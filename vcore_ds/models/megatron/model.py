"""A decoder of parallel layers that returns the loss of every supervised token, as
`vcore_ds.models.causal_lm.TokenLossModel`."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vcore_ds.common.errors import UserError
from vcore_ds.config.sections import LoraConfig
from vcore_ds.data.batches import supervised_tokens
from vcore_ds.distributed import layout
from vcore_ds.models.attention import TRAINING_ATTENTION, RowLayout
from vcore_ds.models.megatron.adapters import (
    AdaptedLayer,
    adapted_layers,
    adapter_pieces,
    add_adapters,
    mark_tensor_parallel,
    without_adapters,
)
from vcore_ds.models.megatron.configuration import WeightSlice, padded_vocabulary, pieces, transformer_config
from vcore_ds.models.megatron.decoder import DecoderLayer, norm
from vcore_ds.models.megatron.parallel_layers import ColumnLinears, RowLinear, TokenEmbedding
from vcore_ds.models.megatron.token_exchange import gather_tokens
from vcore_ds.models.token_loss import VocabularyShard, token_entropy, token_loss


class ParallelTokenLossHead(nn.Module):
    """This rank's rows of the output embedding, giving losses: see `vcore_ds.models.causal_lm.TokenLossHead`."""

    def __init__(self, weight: nn.Parameter, num_rows: int, vocabulary: int):
        """Args:
        weight: `[num_rows, H]`, or a shard of it.
        num_rows: on each rank.
        vocabulary: number of tokens.
        """
        super().__init__()
        self.weight = weight
        first = layout.rank("tensor") * num_rows
        num_tokens = min(num_rows, vocabulary - first)
        self._part = VocabularyShard(first, num_tokens, lambda own: layout.all_gather("tensor", own))

    def forward(
        self, hidden: Tensor, targets: Tensor, *, with_entropies: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Losses `[N]` of `targets [N]` given `hidden [N, H]`, the same on all ranks. A collective; the gradient by
        `hidden` is this rank's part of a sum.

        `with_entropies`: losses and entropies, both `[N]`.
        """
        losses = token_loss(hidden, self.weight, targets, part=self._part)
        return (losses, token_entropy(hidden, self.weight, part=self._part)) if with_entropies else losses


class ParallelTokenLossModel(nn.Module):
    """A decoder each of whose layers the ranks of a tensor group share; `forward` gives the loss of each supervised
    token, the same on all of them.

    Its parameters have no values yet. Those that are divided bear the mark by which DeepSpeed knows them,
    `tensor_model_parallel`; the others are the same on all ranks of a group, and their gradient is the sum over them.

    Attributes:
        lora: adapters that were added, None without.
    """

    def __init__(
        self,
        path: str,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        gradient_checkpointing: bool = False,
        activation_offload: bool = False,
    ):
        """Args:
        path: of the model, for messages.
        config: of the Hugging Face model.
        dtype: of the parameters.
        gradient_checkpointing: keep the input of each layer alone for the backward.
        activation_offload: keep what the backward needs of the layers in host memory until then.

        Raises:
            UserError: see `transformer_config`.
        """
        super().__init__()
        tensor = layout.size("tensor")
        made = transformer_config(path, config, tensor=tensor, dtype=dtype)
        config._attn_implementation = TRAINING_ATTENTION
        self.config, self._activation_offload = config, activation_offload
        self.lora: LoraConfig | None = None
        self._adapted: list[AdaptedLayer] = []
        num_rows = padded_vocabulary(config, tensor)
        self.embed_tokens = TokenEmbedding(
            num_rows, made.hidden_size, config=made, init_method=nn.init.zeros_, tp_group=layout.group("tensor")
        )
        self.rotary = _rotary(config)
        layers = [DecoderLayer(made, config, i) for i in range(made.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = norm(made, made.hidden_size)
        weight = self.embed_tokens.weight
        if not config.tie_word_embeddings:
            weight = ColumnLinears(made, made.hidden_size, {"head": num_rows}).head
        self.lm_head = ParallelTokenLossHead(weight, num_rows // tensor, config.vocab_size)
        if gradient_checkpointing:
            for layer in layers:
                layer.checkpoint_activations()
        for module in self.modules():
            if isinstance(module, ColumnLinears | RowLinear | TokenEmbedding | ParallelTokenLossHead):
                for parameter in module.parameters(recurse=False):
                    mark_tensor_parallel(parameter)

    def add_lora(self, path: str, lora: LoraConfig) -> None:
        """Freezes the model and adds trainable adapters, in place; see `vcore_ds.models.lora.add_lora`."""
        self.lora, self._adapted = lora, adapted_layers(path, self.config, lora)
        add_adapters(self, self._adapted, lora, self.config)

    def trained_pieces(self, *, rank: int, size: int) -> dict[str, WeightSlice]:
        """What each trained parameter is of one of the Hugging Face model, or of its adapters by their names in peft.

        Args:
            rank, size: along the tensor axis.
        """
        if self.lora is None:
            return pieces(self.config, rank=rank, size=size)
        return adapter_pieces(self._adapted, self.config, self.lora, rank=rank, size=size)

    def without_adapters(self) -> AbstractContextManager[None]:
        """A context in which the layers compute without their adapters."""
        return without_adapters(self)

    @property
    def base(self) -> SimpleNamespace:
        """What has the configuration, as the Hugging Face model within a `TokenLossModel` has it."""
        return SimpleNamespace(config=self.config)

    def compute_buffers(self) -> None:
        """Computes the rotary frequencies, which are in no file, again: those that were made while zero.Init replaced
        torch's constructors may have passed through bf16."""
        self.rotary = _rotary(self.config)

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

        A collective over the tensor axis, whose ranks have the same columns.

        Args: those of `vcore_ds.models.causal_lm.TokenLossModel`; t is a multiple of the ranks along the tensor axis.
        """
        if input_ids.shape[1] % layout.size("tensor"):
            raise UserError(
                f"parallel.tensor: found {layout.size('tensor')} together with rows of {input_ids.shape[1]} tokens on "
                "each rank; expected a divisor of them"
            )
        with save_on_cpu(pin_memory=input_ids.is_cuda) if self._activation_offload else nullcontext():
            hidden = self.embed_tokens(input_ids)
            if self.lora is not None and torch.is_grad_enabled():
                hidden.requires_grad_()  # as `vcore_ds.models.lora.add_lora` has it
            angles = self.rotary(hidden, position_ids)
            for layer in self.layers:
                hidden = layer(hidden, angles, row_layout)
        hidden = gather_tokens(self.norm(hidden)).transpose(0, 1)
        return self.lm_head(*supervised_tokens(hidden, targets), with_entropies=with_entropies)


def _rotary(config: PretrainedConfig) -> LlamaRotaryEmbedding:
    """Of any of the families that are served: their configurations have the fields of LLaMA's that it reads."""
    return LlamaRotaryEmbedding(cast(LlamaConfig, config))
