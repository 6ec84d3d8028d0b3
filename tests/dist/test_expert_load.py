"""How unevenly tokens go to experts, counted by hand; on two ranks with numbers of tokens that differ."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.helpers.ranks import run_ranks
from vcore_ds.distributed import layout
from vcore_ds.models.expert_load import forget_tokens, load_of_experts
from vcore_ds.models.experts import OUR_EXPERTS

pytestmark = pytest.mark.dist

# Experts of each token, by rank, layer and forward; 4 experts, of which each rank of a group of two has two.
CHOSEN = [
    [[[[0, 1], [0, 2]], [[0, 3]]], [[[0, 1], [2, 3]], [[1, 3]]]],
    [[[[0, 1]], [[0, 2]]], [[[3, 1]], [[2, 3]]]],
]


def _measure() -> list[dict[str, Any]]:
    config = Qwen3MoeConfig(hidden_size=4, num_experts=4, moe_intermediate_size=2)
    config._experts_implementation = OUR_EXPERTS
    model = nn.ModuleList([Qwen3MoeExperts(config), Qwen3MoeExperts(config)])
    found = [load_of_experts(model, 2)]
    for _ in range(2):  # the second time without what the first one counted
        forget_tokens(model)
        for experts, forwards in zip(model, CHOSEN[layout.rank("shards")], strict=True):
            for chosen in forwards:
                experts(torch.ones(len(chosen), 4), torch.tensor(chosen), torch.ones(len(chosen), 2))
        found.append(load_of_experts(model, 2))
    return [*found, load_of_experts(model)]


def test_loads_by_hand() -> None:
    """Layer 1: experts have 5, 2, 2, 1 tokens, so 5 over 2.5; the ranks 7 and 3. Layer 2: 1, 3, 2, 4; 4 and 6."""
    of_experts = {"expert_load_max": 2.0, "expert_load_mean": (2.0 + 1.6) / 2}
    of_ranks = {"expert_rank_load_max": 1.4, "expert_rank_load_mean": (1.4 + 1.2) / 2}
    for before, first, second, without_expert_parallelism in run_ranks(_measure, 2):
        assert before == {}
        assert first == second == pytest.approx(of_experts | of_ranks)
        assert without_expert_parallelism == pytest.approx(of_experts)
