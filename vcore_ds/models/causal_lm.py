"""A Hugging Face causal language model that returns the loss of every supervised token, and loading it from a folder or
the hub."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.data.batches import supervised_tokens
from vcore_ds.models.attention import OUR_ATTENTION, SequenceLayout
from vcore_ds.models.attention_kernels import keep_attention_outputs
from vcore_ds.models.description import find_auto_class, read_model, refuse_unreadable_model, resolve_attention
from vcore_ds.models.dropout import is_modified, use_token_dropout
from vcore_ds.models.dual_tensors import read_low_rank_tangent
from vcore_ds.models.experts import OUR_EXPERTS
from vcore_ds.models.pointwise import use_formulas
from vcore_ds.models.stored_weights import check_nothing_is_missing
from vcore_ds.models.token_loss import (
    PLAIN,
    LogitTransform,
    PredictionStatistic,
    VocabularyShard,
    compute_raw_logits,
    loss_and_statistic,
    reference_divergence,
    token_loss,
)
from vcore_ds.planning.model_shape import DIVISORS, FACTORS, PLAIN_LOGITS, SOFTCAPS
from vcore_ds.planning.settings import DEFAULT_LOSS_MEMORY, ActivationMemory


def read_logit_transform(config: PretrainedConfig) -> LogitTransform:
    """Read how the architecture computes logits from raw logits."""
    if config.model_type in PLAIN_LOGITS:
        return LogitTransform()
    text = config.get_text_config()
    factor, divisor, softcap = (_read_declared(text, names) for names in (FACTORS, DIVISORS, SOFTCAPS))
    if text.model_type == "hyperclovax":  # uses Granite's field name for a factor
        factor, divisor = divisor, None
    return LogitTransform((factor or 1.0) / (divisor or 1.0), softcap)


def _read_declared(config: PretrainedConfig, names: tuple[str, ...]) -> float | None:
    """Return the first of the fields that the architecture declares; it ignores others in config.json."""
    return next((getattr(config, name) for name in names if hasattr(type(config), name)), None)


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the (language) model without its head, from token ids to hidden states."""
    decoder = model.get_decoder()
    if decoder is model.get_output_embeddings():  # ModernBERT's head is called `decoder`
        return model.base_model
    # get_decoder returns the model with the head if the decoder has an unusual name (Llama 4).
    return decoder.model if hasattr(decoder, "lm_head") else decoder


def find_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the outermost `GradientCheckpointingLayer`s, in order."""
    layers: list[nn.Module] = []
    nested: set[nn.Module] = set()
    for module in decoder.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in nested:
            layers.append(module)
            nested.update(module.modules())
    return layers


def freeze_towers(model: PreTrainedModel) -> None:
    """Freeze everything but decoder and head, in place: text passes through nothing else."""
    used = {id(p) for part in (find_decoder(model), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)


def differentiate_all_rows(model: nn.Module) -> None:
    """Make the gradient of every embedding the derivative of the loss, in place. Reverse mode drops the gradient of row
    `padding_idx` and may divide others by their frequency; forward mode does neither, so with tied embeddings a utility
    would combine two gradients. In many chat models the padding token ends every turn."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx, module.scale_grad_by_freq, module.sparse = None, False, False


class TokenLossHead(nn.Module):
    """The output embedding, returning losses instead of logits.

    It must be a module that *owns* the weight: ZeRO-3 all-gathers a weight while its module runs, once for the forward
    and once for the backward; outside of it the tensor is empty. With tied embeddings the weight is the same
    `Parameter` as that of the input embedding.
    """

    reads_low_rank_tangents = True
    """See `forward_mode`: the forward takes its weights' tangents by `read_low_rank_tangent`."""

    def __init__(self, weight: Tensor, transform: LogitTransform = PLAIN, shard: VocabularyShard | None = None):
        """`weight`: parameter of the output embedding; with a `shard`, that of a rank of a tensor-parallel group."""
        super().__init__()
        self.weight = weight
        self._transform, self._shard = transform, shard
        self.memory = DEFAULT_LOSS_MEMORY

    @classmethod
    def convert(cls, layer: nn.Linear, transform: LogitTransform) -> None:
        """Make a linear layer without a bias an output embedding, in place: it keeps ZeRO-3's hooks, if it has them
        already."""
        layer.__class__ = cls  # type: ignore[assignment]  # the other linear layer has what this one needs
        vars(layer).update(_transform=transform, _shard=None, memory=DEFAULT_LOSS_MEMORY)

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        statistic: PredictionStatistic | None = None,
        reference_hidden: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute losses `[N]` of `targets [N]` given `hidden [N, H]`; with a `statistic`, also that of the
        predictions, `[N]`, with `reference_hidden [N, H]` also the divergences of `reference_divergence`, `[N]`.
        Without targets, compute raw logits `[..., V]` in the precision of the loss, for the architecture's forward.

        With a shard a collective, with the same result on all ranks; the gradient of `hidden` is the rank's term, to be
        summed over them."""
        if targets is None:
            return compute_raw_logits(hidden.flatten(0, -2), self.weight).unflatten(0, hidden.shape[:-1])
        weight = self.weight
        options: dict[str, Any] = {"transform": self._transform, "shard": self._shard, "memory": self.memory}
        if statistic is not None:
            return loss_and_statistic(hidden, weight, targets, statistic, **options)
        tangent = read_low_rank_tangent(self, "weight")
        losses = token_loss(hidden, weight, targets, **options, weight_tangent=tangent)
        if reference_hidden is None:
            return losses
        options = {"transform": self._transform, "memory": self.memory}
        return losses, reference_divergence(hidden, weight, reference_hidden, **options)


MODEL_PREFIX = "causal_lm."
"""Prefix that `TokenLossModel` adds to the names of a model's parameters."""


class TokenLossModel(nn.Module):
    """Wraps a (possibly LoRA-adapted) causal LM; `forward` returns the loss of each supervised token.

    Logits are computed only at supervised positions.
    """

    def __init__(self, causal_lm: PreTrainedModel | PeftModel, *, activation_offload: bool = False):
        """With `activation_offload`, the decoder's saved tensors (with activation checkpoints the inputs of its layers)
        stay in host memory until the backward."""
        super().__init__()
        self.causal_lm: PreTrainedModel | PeftModel = causal_lm
        self._activation_offload = activation_offload
        use_token_dropout(causal_lm)
        use_formulas(causal_lm)
        differentiate_all_rows(causal_lm)
        base = self.base
        head = base.get_output_embeddings()
        if type(head) is not nn.Linear or getattr(head, "bias", None) is not None or is_modified(head):
            raise UserError(
                f"model.path: {base.config.model_type}: the output embedding is {head}; expected another model, with a "
                "plain linear layer without a bias, hooks or another forward (LoRA there is not supported)"
            )
        TokenLossHead.convert(head, read_logit_transform(base.config))

    @property
    def base(self) -> PreTrainedModel:
        """The Hugging Face model without peft's wrapper."""
        if not isinstance(self.causal_lm, PeftModel):
            return self.causal_lm
        base = self.causal_lm.get_base_model()
        assert isinstance(base, PreTrainedModel)
        return base

    @property
    def decoder(self) -> nn.Module:
        """The model without its head, from token ids to hidden states."""
        return find_decoder(self.base)

    @property
    def layers(self) -> list[nn.Module]:
        """The outermost `GradientCheckpointingLayer`s of the decoder, in order; empty if the architecture has none."""
        return find_layers(self.decoder)

    def store_activations(self, activations: ActivationMemory) -> None:
        """Store what `activations` says for the backward."""
        store_activations(self.layers, self.base.get_output_embeddings(), activations)

    @property
    def has_adapters(self) -> bool:
        """Whether the layers have LoRA adapters."""
        return isinstance(self.causal_lm, PeftModel)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Context in which the layers compute without their adapters."""
        assert isinstance(self.causal_lm, PeftModel)
        return self.causal_lm.disable_adapter()

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        position_ids: Tensor,
        sequence_layout: SequenceLayout,
        *,
        statistic: PredictionStatistic | None = None,
        reference_hidden: Tensor | None = None,
        hidden_only: bool = False,
        original_logits: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute losses in nats, fp32, `[N]`, of the supervised tokens among this rank's columns, in row-major order.

        `input_ids`: `[b, t]`, without an attention mask: with causal attention no token sees the padding after it.
        `targets`: `[b, t]`, the next token of each, or `IGNORED_LABEL`; on the host. `position_ids`: `[b, t]`, from 0
        in each sequence; a rank's columns may start within one. `statistic`: also return this statistic of each
        prediction, `[N]`, without a graph. `reference_hidden`: `[N, H]`, the result of `hidden_only` without adapters;
        also return the divergence of each prediction from that model's, `[N]`. `hidden_only`: return the hidden states
        `[N, H]` that predict the supervised tokens. `original_logits`: return the logits `[b, t, V]` of the
        architecture's forward with its eager attention and mask, for unpacked sequences; it may do more than decoder
        and output embedding. Both are options because ZeRO-3 all-gathers parameters within this forward."""
        if original_logits:
            with use_eager_attention(self.base.config.get_text_config()):
                return self.causal_lm(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        # Hugging Face's attention takes no layout, and detects packed sequences by their positions.
        attention = self.base.config.get_text_config()._attn_implementation
        is_ours = attention in OUR_ATTENTION
        if not is_ours and sequence_layout.sequence_parallel > 1:
            raise UserError(
                f"batch.sequence_parallel: found {sequence_layout.sequence_parallel} together with attention "
                f"{attention}; expected 1, or model.attention auto with an architecture whose attention can be replaced"
            )
        options = {"sequence_layout": sequence_layout} if is_ours else {}
        with save_on_cpu(pin_memory=input_ids.is_cuda) if self._activation_offload else nullcontext():
            hidden = self.decoder(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, **options
            ).last_hidden_state
        hidden, targets = supervised_tokens(hidden, targets)
        if hidden_only:
            return hidden
        head = self.base.get_output_embeddings()
        return head(hidden, targets, statistic=statistic, reference_hidden=reference_hidden)


def store_activations(layers: Sequence[Any], head: Any, activations: ActivationMemory) -> None:
    """Let checkpointed `layers` (`GradientCheckpointingLayer`s) and `head` (a `TokenLossHead`) store what `activations`
    says, in place."""
    head.memory = activations.loss
    for i, layer in enumerate(layers):
        if getattr(layer, "gradient_checkpointing", False):
            layer.gradient_checkpointing = i < len(layers) - activations.num_stored
            if activations.stores_attention:
                func = partial(layer._gradient_checkpointing_func, context_fn=keep_attention_outputs)
                layer._gradient_checkpointing_func = func


@contextmanager
def use_eager_attention(config: PretrainedConfig) -> Iterator[None]:
    """Context in which the decoder runs transformers' eager attention instead of ours, with the architecture's mask."""
    before = config._attn_implementation
    if before in OUR_ATTENTION:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = before


FUNCTIONAL_DROPOUT = (
    "attention_dropout",
    "residual_dropout",  # Seed-OSS, StarCoder 2
    "embedding_dropout",
    "hidden_dropout",
    "activation_dropout",  # OPT, BioGPT, XGLM
    "dropout",
    "layerdrop",
    "router_jitter_noise",  # Mixtral, MiniMax
    "input_jitter_noise",
)
"""Dropout rates in config.json that architectures apply by functions, which `vcore_ds.models.dropout` cannot replace,
unlike modules (`resid_pdrop` of GPT-2 and Phi)."""


def load_causal_lm(
    path: str, *, dtype: torch.dtype | str, attention: str, gradient_checkpointing: bool
) -> PreTrainedModel:
    """Load a model that passed `check_model_folder` by transformers' `from_pretrained`, and prepare it for training.
    `dtype`: of the weights in memory, "auto" for that of the files; `attention`: see `resolve_attention`. Raises
    UserError if the model cannot be loaded, or some of its weights are missing."""
    config = read_training_config(path)
    try:
        with refuse_unreadable_model(path), refuse_failing_code(path):
            loaded: Any = find_auto_class(config).from_pretrained(  # a pair, by output_loading_info
                path,
                config=config,
                dtype=dtype,
                attn_implementation=resolve_attention(config, attention),
                trust_remote_code=False,
                output_loading_info=True,
            )
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise UserError(f"model.path: {path}: the weights do not fit config.json: {first_line(error)}") from None
    model, info = loaded
    check_nothing_is_missing(path, info["missing_keys"])
    return prepare_for_training(model, gradient_checkpointing)


@contextmanager
def refuse_failing_code(name: str) -> Iterator[None]:
    """Context that turns an exception in an architecture's code in transformers into a UserError about the model.

    Some cannot be built under ZeRO-3, or do not run with the arguments of training or their configuration.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        file = Path(frames[-1].filename)
        if not file.is_relative_to(Path(transformers.__file__).parent / "models"):
            raise
        raise UserError(
            f"model.path: {name}: the architecture's own code fails: {type(error).__name__}: {first_line(error)} "
            f"({file.name}:{frames[-1].lineno}); expected another model, or another version of transformers"
        ) from error


def read_training_config(path: str) -> PretrainedConfig:
    """Read the model's configuration and change it for training. Raises UserError as `read_model` does."""
    config = deepcopy(read_model(path).config)
    text = config.get_text_config()
    for name in FUNCTIONAL_DROPOUT:
        if isinstance(getattr(text, name, None), float | int):
            # Utilities are of the model without dropout, and these rates cannot be switched off by hooks.
            setattr(text, name, 0.0)
    config._experts_implementation = OUR_EXPERTS  # no effect on dense models
    return config


def prepare_for_training(model: PreTrainedModel, gradient_checkpointing: bool) -> PreTrainedModel:
    """Disable the KV cache, `freeze_towers`, and optionally enable activation checkpointing; in place."""
    model.config.use_cache = False
    freeze_towers(model)
    if gradient_checkpointing:
        checkpoint_activations(model)
    return model


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make each decoder layer save only its input, and recompute the rest in the backward."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # the name in transformers 5.17
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
