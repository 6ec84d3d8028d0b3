"""The checks before a run's first step, on tiny models of architectures that other architectures' rules do not fit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config, OPTConfig, PretrainedConfig, SeedOssConfig

from tests.helpers import tiny
from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import Batch, collate
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models import causal_lm
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.models.causal_lm import TokenLossModel, read_training_config, refuse_failing_code
from vcore_ds.models.description import can_replace_attention
from vcore_ds.models.dropout import TokenDropout, make_token_keys
from vcore_ds.models.token_loss import LogitTransform
from vcore_ds.training.start_checks import compare_losses, cross_entropy
from vcore_ds.utility.derivative_check import Derivatives

SIZES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)

APART = "another sequence in one pack changes a sequence's losses"
SEEDED = "two forwards of the same batch and seed give different losses"
CAUSAL = "a token's loss depends on the tokens behind it"
LOGITS = "a token's loss is not the cross entropy of the architecture's own logits"

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mixtral": EXPERTS,
    "gpt_oss": EXPERTS,
    "falcon_h1": dict(MAMBA, mamba_d_ssm=64),
    "bamba": dict(MAMBA, attn_layer_indices=[1]),
    "jamba": dict(mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, num_experts=1),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "full_attention"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
    ),
    "seed_oss": dict(residual_dropout=0.1),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0.1, max_position_embeddings=128),
    "phimoe": EXPERTS,
    "inkling_text": dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=16,
    ),
    "recurrent_gemma": dict(lru_width=32, num_hidden_layers=3, attention_window_size=64),
}


def make(architecture: str, *, scale: float = 1.0, attention: str | None = None, **changes: object) -> TokenLossModel:
    """Random weights, in training mode. `scale`: of the output embedding, which makes random logits as large as trained
    ones. `attention`: Hugging Face's name of a kernel; None for ours where it can take the model's place. `changes`: of
    the configuration."""
    config = CONFIG_MAPPING[architecture](
        **SIZES | dict(vocab_size=tiny.VOCABULARY, pad_token_id=0) | ARCHITECTURES.get(architecture, {}) | changes
    )
    torch.manual_seed(0)
    if attention is None:
        attention = TRAINING_ATTENTION if can_replace_attention(config) else "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    model.config.use_cache = False
    model.get_output_embeddings().weight.data.mul_(scale)
    return TokenLossModel(model).train()


def find_failures(model: TokenLossModel, *, is_packed: bool = True, shares_forwards: bool = True) -> set[str]:
    """Run the checks on a model without DeepSpeed; returns the beginnings of the problems that they report."""
    generator = np.random.default_rng(0)
    dataset = [
        TokenizedSequence(i, generator.integers(1, tiny.VOCABULARY, length, dtype=np.int32), np.arange(length) > 0)
        for i, length in enumerate((40, 29))
    ]

    def forward(batch: Batch, **options: bool) -> Tensor:
        for module in model.modules():
            if isinstance(module, TokenDropout):
                module.token_keys = make_token_keys(0, batch.token_sequence_ids(), batch.position_ids())
        return model(*tiny.inputs(batch), **options)

    engine = SimpleNamespace(
        module=model,
        token_losses=forward,
        original_logits=lambda batch: forward(batch, original_logits=True),
        seed_dropout=lambda seed: None,
        has_dropout=any(isinstance(module, TokenDropout) for module in model.modules()),
        without_dropout=lambda: Engine.without_dropout(engine),  # type: ignore[arg-type]
        without_gradient=lambda: Engine.without_gradient(engine),  # type: ignore[arg-type]
        _dropouts=[module for module in model.modules() if isinstance(module, TokenDropout)],
    )
    plan = SimpleNamespace(is_packed=is_packed, shares_forwards=shares_forwards)
    feed = SimpleNamespace(dataset=dataset, plan=plan, pad_token_id=0)
    with torch.no_grad(), torch.random.fork_rng():
        compared = compare_losses(engine, feed)  # type: ignore[arg-type]
    known = (APART, SEEDED, CAUSAL, LOGITS)
    wrong = [
        comparison.problem for comparison in compared if comparison.difference > comparison.tolerances[torch.float32]
    ]
    return {next((start for start in known if problem.startswith(start)), problem) for problem in wrong}


@pytest.mark.parametrize("architecture", ["qwen3", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_correct_models_pass(architecture: str, is_packed: bool) -> None:
    assert find_failures(make(architecture), is_packed=is_packed) == set()


def test_dropout_that_the_step_seeds_passes() -> None:
    model = tiny.token_loss_model(lora=True, dropout=0.5)
    assert any(isinstance(module, TokenDropout) for module in model.modules())
    assert find_failures(model) == find_failures(model, is_packed=False) == set()


@pytest.mark.parametrize("architecture", ["falcon_h1", "bamba", "jamba", "nemotron_h"])
def test_a_state_carried_between_packed_sequences_is_detected(architecture: str) -> None:
    """Unpacked and right-padded, the same models are correct."""
    assert find_failures(make(architecture)) == {APART}
    assert find_failures(make(architecture), is_packed=False) == set()


def test_a_mask_that_ignores_packing_is_detected() -> None:
    assert find_failures(make("gpt_oss", attention="eager")) == {APART}
    assert find_failures(make("gpt_oss", attention="eager"), is_packed=False) == set()


WINDOWED = dict(
    num_experts=4, num_experts_per_tok=2, layer_types=["full_attention", "sliding_attention"],
    use_sliding_window=True, sliding_window=4096,
)  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen2_moe", WINDOWED, "computes with a window of 4096 tokens"),
        ("gemma3_text", dict(use_bidirectional_attention=True), "computes with a mask of its own"),
    ],
)
def test_masks_that_our_attention_does_not_see_are_refused(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    """Also those that differ from ours only beyond the lengths that are compared."""
    with pytest.raises(UserError, match=message):
        find_failures(make(architecture, **changes))


def test_the_remedy_for_sequences_that_are_not_isolated_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone in its forward, no sequence depends on another."""
    model = make("qwen3", scale=20.0)
    decode = model.decoder.forward

    def mix(*arguments: Any, **options: Any) -> Any:
        output = decode(*arguments, **options)
        output.last_hidden_state = output.last_hidden_state.cumsum(0)  # over the sequences of a forward
        return output

    monkeypatch.setattr(model.decoder, "forward", mix)
    (problem,) = find_failures(model, is_packed=False)
    assert problem.startswith("another sequence in one forward changes a sequence's losses") and " to 1" in problem
    assert find_failures(model, is_packed=False, shares_forwards=False) == set()


@pytest.mark.parametrize("architecture", ["seed_oss", "opt", "phimoe"])
def test_unseeded_randomness_is_detected(architecture: str) -> None:
    assert SEEDED in find_failures(make(architecture), is_packed=False)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen3", dict(is_causal=False)),
        ("qwen3_moe", dict(is_causal=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)),
    ],
)
def test_a_model_that_is_not_causal_is_detected(architecture: str, changes: dict[str, Any]) -> None:
    """Only the architecture's attention shows it: ours is causal, and its losses agree with each other."""
    model = make(architecture, scale=20.0, **changes)
    assert find_failures(model) == find_failures(model, is_packed=False) == {CAUSAL, LOGITS}


def test_an_architecture_whose_own_code_fails_is_refused() -> None:
    """MiniCPM3 has a key for each query head whatever its configuration says, and repeats them where that says less.
    What fails elsewhere than in transformers' models keeps its traceback."""
    sizes = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    for attention in (None, "eager"):
        message = r"m: the architecture's own code fails: RuntimeError.*modeling_minicpm3.py:\d+\)"
        with pytest.raises(UserError, match=message), refuse_failing_code("m"):
            find_failures(make("minicpm3", attention=attention, **sizes))
    with pytest.raises(ZeroDivisionError), refuse_failing_code("m"):
        _ = 1 / 0


@pytest.mark.parametrize(("architecture", "scale"), [("inkling_text", 1.0), ("recurrent_gemma", 20.0)])
def test_logits_that_the_architecture_transforms_are_detected(
    architecture: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inkling scales the inputs of its output embedding, RecurrentGemma caps the outputs. The token loss handles both;
    here it is made to ignore them."""
    options = dict(scale=scale, attention="eager")  # Inkling's adds a bias that ours does not
    assert find_failures(make(architecture, **options), is_packed=False) == set()
    monkeypatch.setattr(causal_lm, "read_logit_transform", lambda config: LogitTransform())
    assert find_failures(make(architecture, **options), is_packed=False) == {LOGITS}


def test_longrope_rotates_all_sequences_by_the_longest_of_a_forward() -> None:
    """Why a sequence beyond the limit of longrope needs a separate forward: it changes the losses of a short sequence
    beside it, although the two do not attend to each other. Alone, with padding, the short one has its usual losses."""
    rope = dict(rope_type="longrope", original_max_position_embeddings=64, rope_theta=1e4)
    rope |= dict(short_factor=[1.0] * 4, long_factor=[8.0] * 4)
    config = CONFIG_MAPPING["phi3"](
        **SIZES, vocab_size=tiny.VOCABULARY, pad_token_id=0, max_position_embeddings=512,
        original_max_position_embeddings=64, rope_parameters=rope,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=TRAINING_ATTENTION)
    for parameter in model.parameters():
        parameter.data.mul_(4)  # so that attention is far from uniform
    wrapped = TokenLossModel(model)
    generator = np.random.default_rng(0)
    short, long = (
        TokenizedSequence(i, generator.integers(1, tiny.VOCABULARY, length, dtype=np.int32), np.arange(length) > 0)
        for i, length in enumerate((50, 100))
    )
    with torch.no_grad():
        beside, alone = (wrapped(*tiny.inputs(collate(rows, 0)))[:49] for rows in ([short, long], [short]))
        model.set_attn_implementation("eager")
        plain = model(input_ids=torch.from_numpy(short.input_ids).long()[None])
    expected = torch.nn.functional.cross_entropy(plain.logits[0, :-1], torch.from_numpy(short.input_ids[1:]).long())
    assert float((beside - alone).abs().max()) > 1e-3
    torch.testing.assert_close(alone.mean(), expected)


def test_cross_entropy_is_that_of_supervised_tokens_alone() -> None:
    batch = tiny.make_batch(3)
    logits = torch.randn(*batch.input_ids.shape, tiny.VOCABULARY, dtype=torch.float64)
    every = -torch.log_softmax(logits, -1).gather(-1, batch.input_ids.roll(-1, 1)[..., None])[..., 0]
    torch.testing.assert_close(cross_entropy(logits, batch), every[:, :-1][batch.supervised()])


@pytest.mark.parametrize(
    ("config", "zeroed", "kept"),
    [
        (SeedOssConfig(residual_dropout=0.1, attention_dropout=0.1), ("residual_dropout", "attention_dropout"), ()),
        (OPTConfig(dropout=0.1, layerdrop=0.1), ("dropout", "layerdrop"), ()),
        (CONFIG_MAPPING["mixtral"](router_jitter_noise=0.1), ("router_jitter_noise",), ()),
        (GPT2Config(resid_pdrop=0.2), (), ("resid_pdrop",)),  # a module, whose masks a step seeds
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_dropout_rates_that_no_step_can_seed_are_zeroed(
    config: PretrainedConfig, zeroed: tuple[str, ...], kept: tuple[str, ...], tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    training_config = read_training_config(str(tmp_path))
    assert {name: getattr(training_config, name) for name in zeroed} == dict.fromkeys(zeroed, 0.0)
    assert all(getattr(training_config, name) == getattr(config, name) for name in kept)


def test_independent_rounding_errors_of_two_gradients_cancel_and_missing_terms_do_not() -> None:
    """Gradients of a million elements; `lost` lacks the tangents of a tenth of them."""
    torch.manual_seed(0)
    shared, *own, error, other_error = torch.randn(5, 10**6, dtype=torch.float64)
    first, second = shared + 0.5 * own[0], shared + 0.5 * own[1]
    rounded, vector, orthogonal = first + 0.3 * error, second + 0.3 * other_error, own[0] - 0.5 * shared
    lost = first * (torch.arange(10**6) >= 10**5)

    def agree(vector: Tensor, forward: Tensor, forward_fp32: Tensor | None = None, rounded: Tensor = rounded) -> bool:
        fp32 = None if forward_fp32 is None else float(forward_fp32 @ vector)
        norms = float(rounded.norm() * vector.norm())
        return Derivatives(float(rounded @ vector), float(forward @ vector), fp32, norms, 0.05).agree

    assert not agree(rounded, first)  # the squared norm of a gradient holds its errors
    assert agree(vector, first) and agree(orthogonal, first) and agree(vector, 0 * first, rounded=0 * first)
    assert not agree(vector, lost) and not agree(vector, torch.nan * first)
    assert agree(vector, 0.9 * first, first)  # a JVP in bf16 and in fp32
    assert not agree(vector, 0.9 * first, lost) and not agree(vector, 0.5 * first, first)
