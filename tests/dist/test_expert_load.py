"""The load of experts against numbers counted by hand, on two ranks with different numbers of tokens."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.helpers import step_runs
from tests.helpers.ranks import run_ranks
from vcore_ds.data.batches import Batch, idle_batch, pack
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.experts import OUR_EXPERTS, measure_expert_load, reset_token_counts

pytestmark = pytest.mark.dist

# Experts of each token, by rank, layer and forward; 4 experts, two on each rank of an expert-parallel pair.
CHOSEN = [[[[[0, 1], [0, 2]], [[0, 3]]], [[[0, 1], [2, 3]], [[1, 3]]]], [[[[0, 1]], [[0, 2]]], [[[3, 1]], [[2, 3]]]]]

# Token ids of three sequences. Token v goes to the experts v and v + 1, modulo 4; padding is token 0.
SEQUENCES = ([1, 1, 1, 1, 2], [2, 3, 1], [1, 3])


def _measure_loads() -> list[dict[str, Any]]:
    config = Qwen3MoeConfig(hidden_size=4, num_experts=4, moe_intermediate_size=2)
    config._experts_implementation = OUR_EXPERTS
    model = nn.ModuleList([Qwen3MoeExperts(config), Qwen3MoeExperts(config)])
    loads = [measure_expert_load(model, 2)]
    for _ in range(2):  # the second time must not include the counts of the first
        reset_token_counts(model)
        for experts, forwards in zip(model, CHOSEN[layout.rank("shards")], strict=True):
            for chosen in forwards:
                experts(torch.ones(len(chosen), 4), torch.tensor(chosen), torch.ones(len(chosen), 2))
        loads.append(measure_expert_load(model, 2))
    return [*loads, measure_expert_load(model)]


def _make_model() -> TokenLossModel:
    """Make a model of one layer whose router sees the token's embedding alone, with weights that fix its choice."""
    config = Qwen3MoeConfig(
        vocab_size=4, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = OUR_EXPERTS
    model = AutoModelForCausalLM.from_config(config, attn_implementation=TRAINING_ATTENTION)
    layer = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(4))
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.gate.weight.copy_(2 * torch.eye(4) + torch.eye(4).roll(1, 0))
    return TokenLossModel(model)


def _measure_batch_loads() -> dict[str, dict[str, float]]:
    """Measure the load of the three sequences, dealt to the ranks in different ways."""
    engine = step_runs.make_engine(_make_model(), step_runs.make_recipe())
    sequences = [
        TokenizedSequence(number, np.array(ids, np.int32), np.arange(len(ids)) > 0)
        for number, ids in enumerate(SEQUENCES)
    ]
    a, b, c = ([sequence] for sequence in sequences)
    layout.make_sequence_groups([layout.size("job")])
    arrangements: dict[str, list[list[Batch]]] = {  # by rank
        "padded": [[pack([a, b], 0), pack([c], 0)], [idle_batch(0), idle_batch(0)]],
        "packed": [[pack([a + b], 0)], [pack([c], 0)]],
        "shared": [[pack([a, b, c], 0, sequence_parallel=2)]] * 2,
    }
    loads = {}
    for name, batches in arrangements.items():
        reset_token_counts(engine.module)
        with torch.no_grad():
            for batch in batches[layout.rank("job")]:
                engine.token_losses(batch)
        loads[name] = measure_expert_load(engine.module)
    engine.close()
    return loads


def _measure_on_two_ranks() -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    return _measure_loads(), _measure_batch_loads()


@pytest.fixture(scope="module")
def on_two_ranks() -> list[Any]:
    return run_ranks(_measure_on_two_ranks, 2)


def test_loads_equal_those_counted_by_hand(on_two_ranks: list[Any]) -> None:
    """Layer 1: experts have 5, 2, 2, 1 tokens, so 5 over 2.5; the ranks 7 and 3. Layer 2: 1, 3, 2, 4; 4 and 6."""
    expert_loads = {"expert_load_max": 2.0, "expert_load_mean": (2.0 + 1.6) / 2}
    rank_loads = {"expert_rank_load_max": 1.4, "expert_rank_load_mean": (1.4 + 1.2) / 2}
    for (before, first, second, without_expert_parallelism), _ in on_two_ranks:
        assert before == {}
        assert first == second == pytest.approx(expert_loads | rank_loads)
        assert without_expert_parallelism == pytest.approx(expert_loads)


def test_padding_and_idle_batches_add_no_load(on_two_ranks: list[Any]) -> None:
    """Tokens 1, 2 and 3 occur 6, 2 and 2 times: experts 0 to 3 have 2, 6, 8 and 4 tokens, so 8 over 5."""
    load = pytest.approx({"expert_load_max": 1.6, "expert_load_mean": 1.6})
    for _, loads in on_two_ranks:
        assert loads == {"padded": load, "packed": load, "shared": load}
