"""A Hugging Face causal language model that returns the loss of every supervised token."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from vcore_ds.data import IGNORED_LABEL
from vcore_ds.errors import UserError, first_line
from vcore_ds.method import token_loss

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

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Losses `[N]` of `targets [N]` given `hidden [N, H]`; logits `[..., V]` where no targets are given."""
        if targets is None:
            return nn.functional.linear(hidden, self.weight, self.bias)
        return token_loss(hidden, self.weight, targets, self.bias)


class TokenLossModel(nn.Module):
    """Wraps a (possibly LoRA-adapted) causal LM; `forward` gives the loss of each supervised token.

    Logits are computed at supervised positions only. `causal_lm` is a `PreTrainedModel` or a `PeftModel` around one.
    """

    def __init__(self, causal_lm: nn.Module):
        super().__init__()
        self.causal_lm = causal_lm
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
        return self.causal_lm.get_base_model() if hasattr(self.causal_lm, "get_base_model") else self.causal_lm

    @property
    def decoder(self) -> nn.Module:
        """The model without its head: token ids to hidden states."""
        return getattr(self.base, self.base.base_model_prefix)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order; empty where the architecture keeps them in no list."""
        return list(next((m for m in self.decoder.modules() if isinstance(m, nn.ModuleList)), []))

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Losses in nats, fp32, `[N]`: the supervised tokens in row-major order.

        Args:
            input_ids: `[b, T]`, right-padded. No attention mask: under causal attention no real token sees the
                padding behind it, and without a mask the fastest kernels serve.
            labels: `[b, T]`, not shifted; `IGNORED_LABEL` where a token is not supervised. Column 0 is never predicted.
            position_ids: `[b, T]`, where rows hold several sequences: they start again at 0 in each, and Hugging Face's
                masks keep apart what restarts. None for one sequence a row.
        """
        hidden = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        targets = labels[:, 1:]
        supervised = targets != IGNORED_LABEL
        return self.base.get_output_embeddings()(hidden[:, :-1][supervised], targets[supervised])


def check_model_folder(path: str) -> None:
    """Raises UserError where a local folder cannot hold a model; names that are not folders are hub ids."""
    folder = Path(path)
    if not folder.exists():
        if path.startswith((".", "/", "~")) or path.count("/") != 1:
            raise UserError(f"model.path: {path}: no such folder, and not a hub id (owner/name)")
        return
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path: {path}: no config.json there; expected a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise UserError(
            f"model.path: {path}: found a config.json but no weights (*.safetensors); is the download complete?"
        )


def check_forward_mode(path: str) -> None:
    """Raises UserError where forward mode cannot go through the model: its attention is its own code, and cannot be
    replaced by one with a tangent. A model that is not there yet, or cannot be read, passes: loading says so."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (OSError, ValueError, KeyError):
        return
    if not model_class._supports_attention_backend:
        raise UserError(
            f"utility.estimator: found jvp together with model.path {path} ({model_class.__name__}), whose attention "
            "cannot be replaced by one with a forward-mode derivative; expected finite_difference "
            "(utility.estimator=finite_difference utility.epsilon=auto), or another architecture"
        )


def attention_length(path: str) -> float:
    """Tokens of a sequence whose causal attention costs as much as the linear layers of its decoder.

    A token at position t needs 4 t products per head dimension, on average half of that over a sequence; and 2 per
    linear parameter of a layer. Architectures whose configuration has other names are taken for dense Llama-like ones.
    """
    config = AutoConfig.from_pretrained(path).get_text_config()
    hidden, num_heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    layer_parameters = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads) + 3 * hidden * intermediate
    return layer_parameters / (num_heads * head_dim)


def load_causal_lm(path: str, *, dtype: torch.dtype, attention: str, gradient_checkpointing: bool) -> PreTrainedModel:
    """The pretrained model, ready to train. Under ZeRO-3 loading each rank keeps its shards only.

    Raises UserError where the folder holds no model that can be used.
    """
    check_model_folder(path)
    try:
        config = AutoConfig.from_pretrained(path)
        if getattr(config, "attention_dropout", 0.0):
            # Utilities are those of the model without dropout, and attention reads its rate where no hook can reach it.
            config.attention_dropout = 0.0
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, attn_implementation=attention)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise UserError(f"model.path: {path}: no causal language model can be loaded: {first_line(error)}") from None
    model.config.use_cache = False
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
