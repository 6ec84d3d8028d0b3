"""Shapes that are known by name: parameter counts as published, and as transformers builds the models."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from vcore_ds.config.sections import LoraConfig
from vcore_ds.planning.known_models import CONFIGS, KNOWN_MODELS, find_known_model, parse_shape
from vcore_ds.planning.passes import parameter_counts

PUBLISHED = {
    "Qwen3-0.6B": (596_049_920, 440_467_456, 5_046_272, 40_370_176),
    "Qwen3-1.7B": (1_720_574_976, 1_409_410_048, 8_716_288, 69_730_304),
    "Qwen3-4B": (4_022_468_096, 3_633_511_936, 16_515_072, 132_120_576),
    "Qwen3-8B": (8_190_735_360, 6_946_075_648, 21_823_488, 174_587_904),
    "Qwen3-14B": (14_768_307_200, 13_212_482_560, 32_112_640, 256_901_120),
    "Qwen3-32B": (32_762_123_264, 31_206_298_624, 67_108_864, 536_870_912),
    "Llama-3.1-8B": (8_030_261_248, 6_979_588_096, 20_971_520, 167_772_160),
    "Llama-3.1-70B": (70_553_706_496, 68_452_360_192, 103_546_880, 828_375_040),
    "Llama-3.2-1B": (1_235_814_400, 973_146_112, 5_636_096, 45_088_768),
    "Llama-3.2-3B": (3_212_749_824, 2_818_747_392, 12_156_928, 97_255_424),
}
"""Parameters: in total, without the embeddings, of adapters of rank 8, of adapters of rank 64."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_exact(name: str) -> None:
    shape, (everything, without_embeddings, rank_8, rank_64) = KNOWN_MODELS[name], PUBLISHED[name]
    embeddings = shape.vocabulary_size * shape.hidden_size * (1 if shape.is_tied else 2)
    assert parameter_counts(shape).all == everything
    assert parameter_counts(shape).all - embeddings == without_embeddings
    assert parameter_counts(shape, LoraConfig(rank=8, alpha=8)).trained == rank_8
    assert parameter_counts(shape, LoraConfig(rank=64, alpha=8)).trained == rank_64


EXACT = ("qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "gemma")
"""Types without biases and without norms that a Llama-like decoder lacks, which a plan leaves out."""


@pytest.mark.parametrize("name", [name for name in CONFIGS if KNOWN_MODELS[name].experts is None])
def test_parameter_counts_are_those_of_transformers(name: str) -> None:
    """MoE models: test_moe_shapes.py."""
    config, shape = dict(CONFIGS[name]), KNOWN_MODELS[name]
    kind = config.pop("model_type")
    expected, first_layer = build_parameter_counts(kind, tuple(sorted(config.items())))
    assert parameter_counts(shape).all == pytest.approx(expected, rel=0 if kind in EXACT else 1e-4, abs=0)
    assert (shape.hidden_size * shape.intermediate_size) in first_layer


@lru_cache
def build_parameter_counts(kind: str, sizes: tuple[tuple[str, Any], ...]) -> tuple[int, set[int]]:
    """Parameters of the model, and of the matrices of its first layer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**dict(sizes)))
    layer = model.model.layers[0]
    return sum(weight.numel() for weight in model.parameters()), {weight.numel() for weight in layer.parameters()}


@pytest.mark.parametrize(
    "path, name",
    [
        ("Qwen/Qwen3-32B", "Qwen3-32B"),
        ("models/qwen3-8b-base/", "Qwen3-8B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B"),
        ("Qwen/Qwen2.5-Math-7B-Instruct", "Qwen2.5-7B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1-Distill-Qwen-1.5B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen2.5-7B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-3B", None),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("allenai/Olmo-3-1025-7B", "Olmo-3-7B"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "Mistral-7B"),
        ("mistralai/Mistral-7B-v0.3", "Mistral-7B-v0.3"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("runs/quickstart_data/SmolLM2-135M-Instruct", "SmolLM2-135M"),
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.1-70B"),
        ("zai-org/GLM-4.5-Air-Base", "GLM-4.5-Air"),
        ("Qwen/Qwen3-30B", None),
        ("Qwen/Qwen3-4B2", None),
        ("", None),
    ],
)
def test_models_are_recognized_by_name(path: str, name: str | None) -> None:
    assert find_known_model(path) == name


def test_yarn_extends_the_positions() -> None:
    sizes = CONFIGS["Qwen3-8B"] | {"max_position_embeddings": 40960}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    cases: list[tuple[dict[str, Any], int]] = [(yarn, 131_072), (yarn | {"rope_type": "linear"}, 40_960), ({}, 40_960)]
    cases += [({"type": "yarn", "factor": factor}, n) for factor, n in ((2.0, 81_920), (0.5, 40_960))]  # of older files
    for rope, positions in cases:
        shape = parse_shape(sizes | {"rope_scaling": rope})
        assert shape is not None and shape.max_positions == positions
    without = parse_shape({key: value for key, value in sizes.items() if key != "max_position_embeddings"})
    assert without is not None and without.max_positions is None
