"""Tiny random models and batches, made in memory."""

from typing import Any

import torch
from torch.nn.functional import pad
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from vcore_ds.config.sections import LoraConfig
from vcore_ds.data.batches import IGNORED_LABEL, Batch, pack
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.models.attention import TRAINING_ATTENTION, SequenceLayout
from vcore_ds.models.causal_lm import TokenLossModel, checkpoint_activations
from vcore_ds.models.experts import OUR_EXPERTS
from vcore_ds.models.lora import add_lora

VOCABULARY = 128

PADDING = 0
"""Padding token of the models; also a token of prompts and answers, as in many chat models."""


def qwen3(*, tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: int) -> PreTrainedModel:
    """A Qwen3 of two layers with grouped-query heads (4 query, 2 key/value heads). Its padding token has an embedding
    like any other, but no gradient in reverse mode by PyTorch's `padding_idx`."""
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config = Qwen3Config(
        **{**sizes, "vocab_size": VOCABULARY, "head_dim": 8, **changes}, tie_word_embeddings=tied, use_cache=False
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.pad_token_id = model.get_input_embeddings().padding_idx = PADDING
    return model


_MOE_SIZES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
    num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
)  # fmt: skip
_MOE_KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_key_value_heads=2, head_dim=8, num_experts=6, mlp_only_layers=[0]),
    "qwen3_moe, idle experts": dict(num_key_value_heads=2, head_dim=8, num_experts=64, mlp_only_layers=[0]),
    "deepseek_v3": dict(
        num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8,
        n_routed_experts=6, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
    ),
}  # fmt: skip


def moe_model(
    kind: str = "qwen3_moe", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """An MoE model with two experts per token. `kind`: `qwen3_moe`, six experts, the first layer dense; `qwen3_moe,
    idle experts`, 64, most of them without a token; `deepseek_v3`, with latent attention, groups of experts, a bias of
    its router and a shared expert; or another model type, whose sizes are in `changes`."""
    sizes = {**_MOE_SIZES, **_MOE_KINDS.get(kind, {}), **changes}
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind.partition(", ")[0]](**sizes, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            torch.nn.init.normal_(buffer, std=0.05)
    return model


def make_lora_config(dropout: float = 0.0, targets: str | tuple[str, ...] = "all-linear") -> LoraConfig:
    return LoraConfig(rank=4, alpha=8, dropout=dropout, target_modules=targets)


def with_lora(model: PreTrainedModel, *, dropout: float = 0.0, seed: int = 1, on_experts: bool = True):
    """`model` with adapters, by default also on experts, away from their initial point, where B = 0 and half of the
    gradients vanish."""
    torch.manual_seed(seed)
    with_experts = on_experts and any(name.endswith(".experts") for name, _ in model.named_modules())
    adapted = add_lora(model, make_lora_config(dropout, ("all-linear", "experts") if with_experts else "all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted


def token_loss_model(
    *,
    lora: bool = False,
    dropout: float = 0.0,
    tied: bool = False,
    checkpointing: bool = False,
    moe_kind: str | None = None,
    on_experts: bool = True,
    **kwargs,
) -> TokenLossModel:
    """A Qwen3, or an MoE model of `moe_kind`, that computes token losses. `on_experts`: whether its experts have
    adapters too."""
    model = qwen3(tied=tied, **kwargs) if moe_kind is None else moe_model(moe_kind, **kwargs)
    model.set_attn_implementation(TRAINING_ATTENTION)
    model.set_experts_implementation(OUR_EXPERTS)
    if checkpointing:
        checkpoint_activations(model)
    wrapped = TokenLossModel(with_lora(model, dropout=dropout, on_experts=on_experts) if lora else model)
    wrapped.train()
    return wrapped


def make_batch(num_rows: int, num_tokens: int = 24, seed: int = 3, vocabulary: int = VOCABULARY) -> Batch:
    """Random sequences of different lengths, right-padded, with prompts of different lengths. The padding token is also
    drawn as one of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, vocabulary, (num_rows, num_tokens), generator=generator)
    labels = input_ids.clone()
    for row in range(num_rows):
        labels[row, : 3 + row % 4] = -100
        length = num_tokens - (row * 3) % 11
        input_ids[row, length:] = 0
        labels[row, length:] = -100
    return Batch(list(range(num_rows)), input_ids, labels)


def inputs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, SequenceLayout]:
    """Arguments of `TokenLossModel` for a batch that is not shared among ranks."""
    layout = SequenceLayout.from_lengths(batch.sequence_lengths(), 1, torch.device("cpu"))
    return batch.input_ids, batch.targets(), batch.position_ids(), layout


def take_rows(batch: Batch, indices: list[int], sequence_parallel: int = 1) -> Batch:
    """Some rows of a batch, padded so that `sequence_parallel` ranks can share them."""
    padding = -batch.labels.shape[1] % sequence_parallel

    def select(tensor: torch.Tensor | None, fill: float = 0) -> torch.Tensor | None:
        return None if tensor is None else pad(tensor[indices], (0, padding), value=fill)

    reference = batch.reference_log_probability
    return Batch(
        [batch.sequence_ids[i] for i in indices],
        select(batch.input_ids),
        select(batch.labels, IGNORED_LABEL),
        select(batch.kept),
        None if reference is None else reference[indices],
        select(batch.loss_weights),
        sequence_parallel=sequence_parallel,
    )


def pack_rows(batch: Batch, indices: list[int], sequence_parallel: int = 1) -> Batch:
    """Some rows of a batch, in one pack."""
    references = batch.reference_log_probability
    sequences = [
        TokenizedSequence(
            batch.sequence_ids[i],
            batch.input_ids[i].int().numpy(),
            (batch.labels[i] != IGNORED_LABEL).numpy(),
            kept=None if batch.kept is None else batch.kept[i].numpy(),
            reference_log_probability=None if references is None else float(references[i]),
            loss_weights=None if batch.loss_weights is None else batch.loss_weights[i].numpy(),
        )
        for i in indices
    ]
    return pack([sequences], 0, sequence_parallel)


def deepspeed_config(*, bf16: bool = False, gradient_clipping: float = 0.0, persistence_threshold: int = 0) -> dict:
    """A ZeRO-3 configuration. Clipping is off by default, since it would hide a wrong scale."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": bf16},
        "gradient_clipping": gradient_clipping,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "memory_efficient_linear": False,
            "stage3_param_persistence_threshold": persistence_threshold,
            "reduce_bucket_size": 500_000,  # the default reserves 2 GB
            "stage3_prefetch_bucket_size": 500_000,
        },
    }
