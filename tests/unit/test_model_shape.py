"""A model's shape: from its configuration, and from config.json alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import (
    AutoConfig,
    BambaConfig,
    DeepseekV32Config,
    FalconConfig,
    FalconH1Config,
    Gemma4TextConfig,
    GPT2Config,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    NemotronHConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from vcore_ds.models.description import read_model
from vcore_ds.planning.known_models import QWEN3_32B, parse_shape, read_shape

SIZES = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=192, num_hidden_layers=3)
LONGROPE = dict(
    max_position_embeddings=128,
    original_max_position_embeddings=64,
    rope_parameters={
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    },
)


def test_the_length_at_which_attention_costs_as_much_as_linear_layers(tmp_path: Path) -> None:
    sizes = dict(hidden_size=5120, num_attention_heads=64, num_key_value_heads=8, head_dim=128, intermediate_size=25600)
    Qwen3Config(num_hidden_layers=64, max_position_embeddings=40960, **sizes).save_pretrained(tmp_path)
    per_layer = 5120 * 8192 * 2 + 5120 * 1024 * 2 + 3 * 5120 * 25600  # q and o, k and v, the MLP
    assert read_model(str(tmp_path)).shape.attention_length == pytest.approx(per_layer / 8192)
    assert read_model(str(tmp_path)).shape == read_shape(str(tmp_path)) == replace(QWEN3_32B, max_positions=40_960)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SIZES),
        Qwen2Config(**SIZES),
        LlamaConfig(**SIZES),
        MistralConfig(**SIZES),
        Phi3Config(**SIZES, pad_token_id=0),
        GPT2Config(n_embd=64, n_head=4, n_layer=2),
        Phi3Config(**SIZES, **LONGROPE, pad_token_id=0),
        Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]),
    ],
    ids=lambda config: config.model_type,
)
def test_config_json_and_transformers_give_the_same_shape(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    assert (shape := read_shape(str(tmp_path))) == read_model(str(tmp_path)).shape
    assert shape is not None and shape.max_positions == config.max_position_embeddings


@pytest.mark.parametrize("kind, number", [("gemma2", 4), ("gemma3_text", 4), ("glm4", 4), ("glm4_moe", 2)])
def test_outputs_of_attention_and_mlp_may_have_norms_too(kind: str, number: int, tmp_path: Path) -> None:
    AutoConfig.for_model(kind, **SIZES).save_pretrained(tmp_path)
    assert (shape := read_shape(str(tmp_path))) is not None and shape.norms_per_layer == number


MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_ssm=128)
CONV = "whose layers (conv) are not all attention"
RECURRENT = "whose layers (linear_attention) are not all attention"
HYBRID = "whose layers (hybrid) are not all attention"


@pytest.mark.parametrize(
    "config, no_sequence_parallelism, unpackable",
    [
        (Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]), CONV, CONV),
        (Gemma4TextConfig(), None, None),  # as many query heads in each layer, of two sizes
        (Llama4TextConfig(), "whose attention cannot be replaced", "whose layers (chunked_attention) are not"),
        (JambaConfig(**SIZES), RECURRENT, RECURRENT),
        (BambaConfig(**SIZES, **MAMBA), RECURRENT, RECURRENT),
        (FalconH1Config(**SIZES, **MAMBA), HYBRID, HYBRID),
        (NemotronHConfig(**SIZES), RECURRENT, RECURRENT),
        (FalconConfig(), "whose attention cannot be replaced", "whose attention cannot be replaced"),
        (DeepseekV32Config(), "whose attention cannot be replaced", "whose attention selects keys by their place"),
        (MambaConfig(), "whose configuration has no single num_attention_heads", "whose configuration has no "),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_without_sequence_parallelism_or_packing_give_the_reason(
    config: PretrainedConfig, no_sequence_parallelism: str | None, unpackable: str | None, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    shape = read_model(str(tmp_path)).shape
    for reason, expected in ((shape.no_sequence_parallelism, no_sequence_parallelism), (shape.unpackable, unpackable)):
        assert reason == expected if expected is None else reason is not None and reason.startswith(expected)


@pytest.mark.parametrize(
    "config", [JambaConfig(**SIZES), BambaConfig(**SIZES, **MAMBA), FalconH1Config(**SIZES, **MAMBA)]
)
def test_config_json_alone_shows_layers_that_carry_a_state(config: PretrainedConfig, tmp_path: Path) -> None:
    """These derive the kinds of their layers, so the file does not list them."""
    config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    assert shape is not None and shape.unpackable is not None and " not all attention" in shape.unpackable


_SIZES = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64)


@pytest.mark.parametrize(
    "fields, unpackable",
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "conv_kernel": 4}, None),  # the list says it
        ({"layers_block_type": ["moe", "dense"]}, None),
        ({"block_types": ["sparse", "mlp"]}, None),
        ({"layers_block_type": ["attention", "mamba"]}, "whose layers (attention, mamba) are not all attention"),
        ({"block_types": ["conv"]}, "whose layers (conv) are not all attention"),
        ({"layer_types": [], "ssm_state_size": 8}, "whose layers are not all attention (it has ssm_state_size)"),
        ({"conv_kernel": 4}, "whose layers are not all attention (it has conv_kernel)"),
        ({"mamba_d_state": 4}, "whose layers are not all attention (it has mamba_d_state)"),
        ({"conv1d_width": 4}, "whose layers are not all attention (it has conv1d_width)"),
        ({"mamba_d_conv": None, "ssm_cfg": {}}, None),
        ({"index_topk": 64}, "whose attention selects keys by their place in the pack"),
        ({"index_topk": 0}, None),
    ],
)
def test_config_json_says_what_cannot_be_packed(fields: dict[str, object], unpackable: str | None) -> None:
    shape = parse_shape(_SIZES | fields)
    assert shape is not None and shape.unpackable == shape.no_sequence_parallelism == unpackable


@pytest.mark.parametrize(
    "fields, rope, limit",
    [
        # Before transformers 5, and by kind of layer.
        ({"rope_scaling": {"type": "dynamic"}, "max_position_embeddings": 512}, "dynamic", 512),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}, "longrope", 64),
        ({"rope_parameters": LONGROPE["rope_parameters"], "max_position_embeddings": 128}, "longrope", 64),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "dynamic", 0),  # it does not say
        ({"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": 512}, "default", None),
    ],
)
def test_rotary_embeddings_are_read_in_every_form(fields: dict[str, object], rope: str, limit: int | None) -> None:
    shape = parse_shape(_SIZES | fields)
    assert shape is not None and (shape.rope, shape.rope_limit) == (rope, limit)


def test_a_rotary_embedding_that_depends_on_the_largest_position_limits_packing(tmp_path: Path) -> None:
    """Up to its limit it does not; beyond, each forward may hold only one sequence."""
    dynamic = LlamaConfig(
        **SIZES, max_position_embeddings=512, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    for config, rope, limit in (
        (Phi3Config(**SIZES, **LONGROPE, pad_token_id=0), "longrope", 64),
        (dynamic, "dynamic", 512),
    ):
        config.save_pretrained(tmp_path / rope)
        shape = read_model(str(tmp_path / rope)).shape
        assert (shape.rope, shape.rope_limit) == (rope, limit) and shape == read_shape(str(tmp_path / rope))
        assert shape.adapt_to_length(limit) == shape and shape.unpackable is None
        long = shape.adapt_to_length(limit + 1)
        assert long.is_alone and f"({rope}) depends on the largest position" in str(long.unpackable)
        assert long.no_sequence_parallelism == long.unpackable
    linear = LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    linear.save_pretrained(tmp_path)
    assert read_model(str(tmp_path)).shape.rope_limit is None


def test_the_text_config_of_a_vision_language_model_is_read(tmp_path: Path) -> None:
    text = dict(num_hidden_layers=4, num_attention_heads=8, hidden_size=64)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", "hidden_size": 7, "text_config": text}))
    shape = read_shape(str(tmp_path))
    assert shape is not None
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 8, 8, 8)
    assert shape.layer_parameters == 64 * 8 * 32 + 3 * 64 * 256  # four times as wide where nothing is said
    assert shape.hidden_size == 0  # without a vocabulary, memory is not estimated


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"num_hidden_layers": 2, "num_attention_heads": 4}',
        '{"num_hidden_layers": 2, "num_attention_heads": 0, "hidden_size": 64}',
        '{"num_hidden_layers": 2, "num_attention_heads": "4", "hidden_size": 64}',
        '{"num_hidden_layers": true, "num_attention_heads": 4, "hidden_size": 64}',
        "[" * 100_000,
    ],
)
def test_an_invalid_configuration_gives_no_shape(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_shape(str(tmp_path)) is None
    assert read_shape(str(tmp_path / "nowhere")) is None


def test_a_model_in_the_cache_of_the_hub_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--somebody--a-model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123abc")
    assert read_shape("somebody/a-model") is None  # the file itself is missing
    (folder / "snapshots" / "0123abc").mkdir(parents=True)
    Qwen3Config(**SIZES).save_pretrained(folder / "snapshots" / "0123abc")
    shape = read_shape("somebody/a-model")
    assert shape is not None and (shape.num_layers, shape.num_heads) == (3, 8)
