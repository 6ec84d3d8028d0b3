"""Packed equals unpacked: losses, utilities, weights, gradients, for sft and vcore, jvp and finite difference."""

import numpy as np
import pytest
import torch

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.data.batches import Batch, StepBatches, collate, idle_batch, merge_batches, pack
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.models.attention import TRAINING_ATTENTION

pytestmark = pytest.mark.dist

LENGTHS = (17, 5, 9, 24, 3, 12, 8, 30)


def sequences(seed: int = 0) -> list[TokenizedSequence]:
    generator = np.random.default_rng(seed)

    def sequence(i: int, length: int) -> TokenizedSequence:
        ids = generator.integers(1, tiny.VOCABULARY, length, dtype=np.int32)
        return TokenizedSequence(i, ids, np.arange(length) >= 1 + i % 3)

    return [sequence(i, length) for i, length in enumerate(LENGTHS)]


def layouts(made: list[TokenizedSequence]) -> dict[str, list[Batch]]:
    """This rank's micro-batches: the same sequences unpacked or in packs, in one or two batches."""
    local = made[layout.rank("shards") :: layout.size("shards")]
    half = len(local) // 2
    return {
        "unpacked": [collate(local[:half], 0), collate(local[half:], 0)],
        "one pack in a batch": [pack([local[:half]], 0), pack([local[half:]], 0)],
        "packs of several and of one": [pack([local[1:], local[:1]], 0), idle_batch(0)],
    }


SECTIONS = {
    "sft": {"method": {"name": "sft", "normalization": "token"}},
    "jvp": {"method": {"kl_budget": 0.2}},
    "jvp, adam, lora": {"method": {"kl_budget": 0.2}, "probe": {"direction": "adam"}, "lora": {"rank": 4, "alpha": 8}},
    "finite difference": {
        "method": {"kl_budget": 0.2, "alpha": "variance"},
        "utility": {"estimator": "finite_difference", "epsilon": 5.0},
    },
}
ATTENTIONS = (TRAINING_ATTENTION, "sdpa")


def run_layout(section: str, arrangement: str, batches_per_pass: int, attention: str) -> dict[str, torch.Tensor]:
    recipe = step_runs.make_recipe(**SECTIONS[section])
    model = tiny.token_loss_model(lora=recipe.lora is not None)
    model.base.config._attn_implementation = attention
    engine = step_runs.make_engine(model, recipe)
    estimator = step_runs.make_estimator(recipe, engine, batches_per_pass)
    tensors: dict[str, torch.Tensor] = {}
    # Adam's direction takes the moments of a step before.
    for k in range(2 if "adam" in section else 1):
        main = layouts(sequences(seed=k))[arrangement]
        probe = layouts(sequences(seed=10 + k))[arrangement] if estimator.direction is not None else []
        recorded = step_runs.Recorder(engine)
        metrics = step_runs.train_step(engine, recipe, StepBatches(main, probe), estimator, recorded)
        for batch, result in zip(main, recorded.results, strict=True):
            for number, sequence_id in enumerate(batch.sequence_ids):
                tokens, in_sequence = result.tokens, result.tokens.sequence_index == number
                tensors[f"{k} losses {sequence_id}"] = tokens.losses[in_sequence]
                tensors[f"{k} weights {sequence_id}"] = result.weights.weights[in_sequence]
                if tokens.utilities is not None:
                    tensors[f"{k} utilities {sequence_id}"] = tokens.utilities[in_sequence]
        tensors[f"{k} gradient"] = torch.cat([g.flatten() for g in recorded.gradient.values()])
        numbers = ("loss", "weighted_loss", "alpha", "effective_sample_size", "grad_norm")
        tensors[f"{k} metrics"] = torch.tensor([metrics.values[name] for name in numbers])
        assert metrics.tokens is not None
        for record in metrics.tokens:
            for name in ("positions", "token_ids", "losses", "weights"):
                tensors[f"{k} recorded_{name} {record.sequence_id}"] = torch.from_numpy(getattr(record, name))
            coefficients = [record.alpha, record.share, record.uniform_share, record.weights.sum()]
            tensors[f"{k} recorded_coefficients {record.sequence_id}"] = torch.tensor(coefficients)
    engine.close()
    return tensors


def run_all() -> dict[str, dict[str, float]]:
    """Worst relative deviation from unpacked sequences, by quantity."""
    worst = {}
    for section in SECTIONS:
        for attention in ATTENTIONS if section == "jvp" else (TRAINING_ATTENTION,):
            expected = run_layout(section, "unpacked", 1, attention)
            for arrangement, batches_per_pass in (("one pack in a batch", 2), ("packs of several and of one", 2)):
                measured = run_layout(section, arrangement, batches_per_pass, attention)
                assert measured.keys() == expected.keys()
                # All sequences of a step together: the one supervised token of a short one may be near zero.
                together = {" ".join(name.split()[:2]) for name in measured}
                deviations: dict[str, float] = {}
                for start in sorted(together):
                    names = [name for name in measured if name.startswith(start)]
                    left, right = (torch.cat([named[name] for name in names]) for named in (measured, expected))
                    quantity = start.split()[1]
                    deviations[quantity] = max(deviations.get(quantity, 0.0), step_runs.relative_error(left, right))
                worst[f"{section}, {attention}, {arrangement}"] = deviations
    return worst


def test_packed_equals_unpacked() -> None:
    for rank, worst in enumerate(run_ranks(run_all, 2)):
        for case, deviations in worst.items():
            print(f"rank {rank}, {case}: " + "  ".join(f"{name} {value:.1e}" for name, value in deviations.items()))
            assert all(deviation < 1e-5 for deviation in deviations.values()), case


def test_a_packed_batch_by_hand() -> None:
    def sequence(i: int, *ids: int) -> TokenizedSequence:
        return TokenizedSequence(i, np.array(ids, dtype=np.int32), np.arange(len(ids)) >= 1)

    batch = pack([[sequence(7, 1, 2, 3), sequence(9, 4, 5)], [sequence(4, 6, 7, 8, 9)]], pad_token_id=0)
    assert batch.sequence_ids == [7, 9, 4] and batch.num_sequences == 3
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[-100, 2, 3, -100, 5, -100, -100, -100], [-100, 7, 8, 9] + [-100] * 4]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1], [2, 2, 2, 2, -1, -1, -1, -1]]
    assert batch.sequence_lengths() == [[3, 2, 3], [4, 4]]
    assert batch.token_sequence_ids().tolist() == [[7, 7, 7, 9, 9, -1, -1, -1], [4] * 4 + [-1] * 4]
    assert batch.targets()[:, :-1].tolist() == batch.labels[:, 1:].tolist()
    assert batch.position_ids().tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch.sequence_index().tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.num_supervised_tokens().tolist() == [2, 1, 3]

    merged = merge_batches([idle_batch(0), batch, collate([sequence(5, 3, 3, 3)], 0)])
    assert merged.sequence_ids == [7, 9, 4, 5] and merged.num_sequences == 5
    assert merged.sequence_index().tolist() == [1, 1, 2, 3, 3, 3, 4, 4]
    assert merged.num_supervised_tokens().tolist() == [0, 2, 1, 3, 2]


def test_unpacked_sequences_need_no_segments() -> None:
    batch = collate(sequences(), 0)
    assert batch.segments is None and batch.num_sequences == len(LENGTHS)
    assert batch.sequence_lengths() == [[32]] * len(LENGTHS)
    assert batch.position_ids().tolist() == [list(range(32))] * len(LENGTHS)
    assert batch.token_sequence_ids().tolist() == [[i] * 32 for i in range(len(LENGTHS))]
    assert idle_batch(0).token_sequence_ids().tolist() == [[-1] * 8]
