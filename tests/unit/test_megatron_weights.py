"""Parts of a Hugging Face model's weights: of every rank, in one piece and in shards, and put together again."""

import pytest
import torch

from tests.helpers import tiny
from vcore_ds.models.megatron.configuration import copy_to_weight, iter_runs, weight_slices


@pytest.fixture
def model():
    """Sizes by which pieces of rows and columns, and padding, are told apart."""
    return tiny.qwen3(vocab_size=13, hidden_size=24, intermediate_size=36, head_dim=6)


@pytest.mark.parametrize("size", [1, 2])
def test_the_parts_of_all_ranks_are_the_model(model, size):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    of_ranks = [
        {
            name: piece.take(weights[piece.name])
            for name, piece in weight_slices(model.config, rank=rank, size=size).items()
        }
        for rank in range(size)
    ]
    found = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    for rank, of_rank in enumerate(of_ranks):
        for name, piece in weight_slices(model.config, rank=rank, size=size).items():
            copy_to_weight(found, of_rank[name], piece)
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert sum(t.numel() for of_rank in of_ranks for t in of_rank.values()) == sum(
        weight.numel() * (size if "norm" in name else 1) for name, weight in weights.items()
    )


def test_a_rank_has_whole_heads(model):
    parts = weight_slices(model.config, rank=1, size=2)
    prefix = "model.layers.0.self_attn."
    for name, first in (("q", 12), ("k", 6), ("v", 6)):
        found = parts[f"layers.0.self_attn.qkv.{name}_proj"]
        assert (found.name, found.rows) == (f"{prefix}{name}_proj.weight", slice(first, 2 * first))
    assert parts["layers.0.self_attn.o_proj.weight"].columns == slice(12, 24)


@pytest.mark.parametrize("num_shards", [1, 3, 7])
@pytest.mark.parametrize("rank", [0, 1])
def test_runs_of_shards_are_the_flattened_parameter(model, rank, num_shards):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    shapes = {name: weight.shape for name, weight in weights.items()}
    for name, piece in weight_slices(model.config, rank=rank, size=2).items():
        expected = piece.take(weights[piece.name]).flatten()
        shard_numel = -(-(len(expected) + 5) // num_shards)  # with padding of 5 elements at the end
        shards = []
        for start in range(0, shard_numel * num_shards, shard_numel):
            shard = torch.zeros(shard_numel)
            for run in iter_runs(piece, shapes, start, start + shard_numel):
                values = weights[run.name].flatten()[run.start : run.start + run.numel]
                assert len(values) == run.numel > 0
                assert not shard[run.offset : run.offset + run.numel].any()
                shard[run.offset : run.offset + run.numel] = values
            shards.append(shard)
        found = torch.cat(shards)
        assert torch.equal(found[: len(expected)], expected), name
        assert not found[len(expected) :].any()
