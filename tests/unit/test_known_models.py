"""Shapes that are known by name: parameter counts as published, and as transformers builds the models."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from tests.helpers.scaled_model import config_of
from vcore_ds.planning.memory import AdapterShape, parameter_counts
from vcore_ds.planning.model_shape import KNOWN_MODELS, MIXTURES, known_model

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
"""All, all but the embeddings, adapters of rank 8 and of rank 64."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_exact(name: str) -> None:
    shape, (everything, without_embeddings, rank_8, rank_64) = KNOWN_MODELS[name], PUBLISHED[name]
    embeddings = shape.vocabulary_size * shape.hidden_size * (1 if shape.is_tied else 2)
    assert parameter_counts(shape).all == everything
    assert parameter_counts(shape).all - embeddings == without_embeddings
    assert parameter_counts(shape, AdapterShape(8)).trained == rank_8
    assert parameter_counts(shape, AdapterShape(64)).trained == rank_64


@pytest.mark.parametrize("name", [name for name in KNOWN_MODELS if name not in MIXTURES])  # those: test_mixtures.py
def test_transformers_builds_as_many_parameters(name: str) -> None:
    shape = KNOWN_MODELS[name]
    kinds = {"Qwen3": Qwen3Config, "Mistral": MistralConfig}
    kind = next((config for prefix, config in kinds.items() if name.startswith(prefix)), LlamaConfig)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape, kind))
    sizes = {parameter.numel() for parameter in model.model.layers[0].parameters() if parameter.dim() == 2}
    assert parameter_counts(shape).all == sum(parameter.numel() for parameter in model.parameters())
    assert shape.hidden_size * shape.intermediate_size in sizes


@pytest.mark.parametrize(
    "path, name",
    [
        ("Qwen/Qwen3-32B", "Qwen3-32B"),
        ("models/qwen3-8b-base/", "Qwen3-8B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("runs/quickstart_data/SmolLM2-135M-Instruct", "SmolLM2-135M"),
        ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B"),
        ("zai-org/GLM-4.5", "GLM-4.5"),
        ("zai-org/GLM-4.5-Air-Base", "GLM-4.5-Air"),
        ("Qwen/Qwen3-30B", None),
        ("Qwen/Qwen3-4B2", None),
        ("", None),
    ],
)
def test_models_by_name(path: str, name: str | None) -> None:
    assert known_model(path) == name
