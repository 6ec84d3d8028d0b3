"""Layers between decoder and softmax: the token loss of many architectures against their logits, in fp64."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vcore_ds.config.sections import LoraConfig
from vcore_ds.data.batches import IGNORED_LABEL
from vcore_ds.models.attention import SequenceLayout
from vcore_ds.models.causal_lm import TokenLossModel, find_decoder, freeze_towers, read_logit_transform
from vcore_ds.models.description import VISION_LANGUAGE, find_auto_class, is_vision_language
from vcore_ds.models.lora import add_lora
from vcore_ds.models.token_loss import PLAIN
from vcore_ds.planning.known_models import parse_shape
from vcore_ds.planning.model_shape import LOGIT_TRANSFORMS

VOCABULARY, TOKENS = 96, 20
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
MAMBA = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8)
GEMMA_4 = dict(
    final_logit_softcapping=2.0, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY,
    global_head_dim=8, num_global_key_value_heads=2, num_kv_shared_layers=0,
)  # fmt: skip
ROTARY = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], mrope_interleaved=True)
DELTA_NET = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
    rope_parameters={**ROTARY, "mrope_section": [1, 0, 0], "partial_rotary_factor": 0.25},
)  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, depth=2, num_heads=4, num_attention_heads=4,
    out_hidden_size=32, image_size=28, patch_size=14, num_position_embeddings=16, deepstack_visual_indexes=[0, 1],
)  # fmt: skip

TRANSFORMED = {
    "gemma2": dict(final_logit_softcapping=2.0),
    "gemma4_text": GEMMA_4,
    "recurrent_gemma": dict(logits_soft_cap=2.0, lru_width=32),
    "granite": dict(logits_scaling=4.0),
    "hyperclovax": dict(logits_scaling=4.0),
    "minicpm3": dict(num_key_value_heads=4, dim_model_base=16, **LATENT),
    "inkling_text": dict(logits_mup_width_multiplier=0.5, unpadded_vocab_size=None, **EXPERTS),
    "cohere2": dict(logit_scale=0.25),
    "falcon_h1": dict(lm_head_multiplier=0.3, **MAMBA),
}
"""One architecture for each way to write a transform of the logits."""
TEXT_SIZES = {
    "gemma3": {},
    "gemma4": GEMMA_4,
    "llama4": dict(num_local_experts=2, intermediate_size_mlp=48),
    "mistral3": {},
    "qwen2_5_vl": dict(rope_parameters=ROTARY),
    "qwen3_5": DELTA_NET,
    "qwen3_5_moe": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_vl": dict(rope_parameters=ROTARY),
    "qwen3_vl_moe": dict(rope_parameters=ROTARY, **EXPERTS),
}


def make_text_config(model_type: str, **changes: object) -> PretrainedConfig:
    return CONFIG_MAPPING[model_type](**{**SIZES, **changes})


def make_vision_language_config(model_type: str, **changes: int) -> PretrainedConfig:
    default = CONFIG_MAPPING[model_type]()
    vision = "gemma4_vision" if model_type == "gemma4" else default.vision_config.model_type
    return CONFIG_MAPPING[model_type](
        text_config={**SIZES, **TEXT_SIZES[model_type], **changes, "model_type": default.get_text_config().model_type},
        vision_config={**VISION, "model_type": vision},
    )


def make(config: PretrainedConfig) -> PreTrainedModel:
    """Make a model in fp64, with weights so large that logits are capped."""
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part._experts_implementation = "eager"  # grouped GEMMs of transformers take at most 32 bits
    torch.manual_seed(0)
    model = find_auto_class(config).from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    return model.double()


def compute_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    try:
        return model(input_ids=ids, use_cache=False).logits
    except AttributeError as error:  # Llama 4's own forward in transformers 5.24
        assert model.config.model_type.startswith("llama4") and "image_outputs" in str(error)
        return model.get_output_embeddings()(find_decoder(model)(input_ids=ids, use_cache=False).last_hidden_state)


def measure_loss_error(model: PreTrainedModel) -> float:
    """Relative error of the token loss against the cross-entropy of the model's logits."""
    ids = torch.randint(3, 80, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), IGNORED_LABEL)], 1)
    layout = SequenceLayout.from_lengths([[TOKENS]] * 2, 1, torch.device("cpu"))
    with torch.no_grad():
        logits = compute_logits(model, ids)
        expected = cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten(), reduction="none")
        wrapped = TokenLossModel(model)
        losses = wrapped(ids, targets, torch.arange(TOKENS).expand(2, TOKENS), layout)
        # Others ask the wrapped model for its logits.
        torch.testing.assert_close(compute_logits(model, ids), logits)
    return float((losses - expected).norm() / expected.norm())


@pytest.mark.parametrize("model_type", TRANSFORMED)
def test_losses_are_those_of_the_models_own_logits(model_type: str) -> None:
    config = make_text_config(model_type, **TRANSFORMED[model_type])
    shape = parse_shape(config.to_dict())
    assert read_logit_transform(config) != PLAIN and (shape is None or not shape.has_plain_logits)
    error = measure_loss_error(make(config))
    print(f"{model_type}: {read_logit_transform(config)}, relative error {error:.1e}")
    assert error < 1e-12


@pytest.mark.parametrize("model_type", ["llama4_text", "opt", "mpt"])
def test_decoders_under_other_names_are_supported(model_type: str) -> None:
    sizes = {
        "llama4_text": {**SIZES, **TEXT_SIZES["llama4"]},
        "opt": dict(ffn_dim=48, word_embed_proj_dim=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        "mpt": dict(d_model=32, n_heads=4, n_layers=2, logit_scale=3.0),  # which its forward does not read
    }[model_type]
    config = CONFIG_MAPPING[model_type](**{**sizes, "vocab_size": VOCABULARY})
    assert measure_loss_error(make(config)) < 1e-12
    shape = parse_shape(config.to_dict())
    assert shape is None or shape.has_plain_logits  # sizes of mpt have other names


# ---- vision-language models ----------------------------------------------------------------------------------------


def test_every_kind_of_vision_language_model_is_tested_here() -> None:
    assert sorted(TEXT_SIZES) == sorted(VISION_LANGUAGE)


@pytest.mark.parametrize("model_type", VISION_LANGUAGE)
def test_only_the_language_model_of_a_vision_language_model_is_trained(model_type: str) -> None:
    config = make_vision_language_config(model_type)
    assert is_vision_language(config)
    model = make(config)
    freeze_towers(model)
    language_model = next(name for name, module in model.named_modules() if module is find_decoder(model))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(name.startswith(language_model) or "lm_head" in name for name in trained)
    assert model.get_output_embeddings().weight.requires_grad
    assert {name for name, _ in model.named_parameters() if name.startswith(language_model)} <= set(trained)
    assert set(trained) < {name for name, _ in model.named_parameters()}
    error = measure_loss_error(model)
    print(f"{model_type}: relative error {error:.1e}")
    assert error < 1e-12


def test_adapters_are_for_the_language_model_alone() -> None:
    # The vision tower of Gemma 3 has layers of the same names.
    for targets in ("all-linear", ("q_proj",)):
        adapted = add_lora(
            make(make_vision_language_config("gemma3")), LoraConfig(rank=4, alpha=8, target_modules=targets)
        )
        names = [name for name, p in adapted.named_parameters() if p.requires_grad]
        assert names and all(".language_model." in name for name in names)


# ---- nothing is missing from the tables ----------------------------------------------------------------------------


def iter_forwards() -> Iterator[tuple[str, str]]:
    """(type, source of its causal language model) of all architectures, without importing them, which takes long."""
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        folder = Path(transformers.__file__).parent / "models" / transformers._class_to_module[name].split(".")[1]
        sources = (file.read_text(encoding="utf-8") for file in folder.glob("modeling_*.py"))
        matches = (
            re.search(rf"^class {name}\(.*?(?=^(?:class |@|__all__)|\Z)", text, re.DOTALL | re.MULTILINE)
            for text in sources
        )
        yield model_type, next(match[0] for match in matches if match)


def test_the_tables_hold_every_architecture_that_transforms_its_logits() -> None:
    operations = re.compile(r"logits\S* = .*(?:[*/] |tanh|soft_?cap)|lm_head\(.*\) [*/]|hidden_states = .* / ")
    missing, needless = [], []
    for model_type, source in iter_forwards():
        config_type = CONFIG_MAPPING[model_type]
        text_type = (config_type.sub_configs or {}).get("text_config", config_type)
        is_known = any(hasattr(text_type, name) for name in LOGIT_TRANSFORMS)
        if operations.search(source) and not is_known:
            missing.append(model_type)
        if is_known and not operations.search(source):
            needless.append(model_type)
    assert not missing
    assert needless == ["gemma3", "mpt"]  # they have a field that is not read
