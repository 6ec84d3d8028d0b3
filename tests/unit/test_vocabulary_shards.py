"""The token loss of ranks that each have a shard of the vocabulary, against that of the unsharded one, in fp64.

Ranks are threads here: each computes with its shard, and waits for the others where they exchange tensors.
"""

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.functional import pad

from tests.helpers.commands import HANG_SECONDS
from vcore_ds.models.token_loss import PLAIN, LogitTransform, VocabularyShard, loss_and_statistic, token_loss
from vcore_ds.planning.settings import LossMemory

module = importlib.import_module("vcore_ds.models.token_loss")

NUM_TOKENS, HIDDEN, VOCABULARY = 23, 7, 11


class Ranks:
    """`num_ranks` threads that exchange tensors."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._slots: list[Tensor] = [torch.empty(0)] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=HANG_SECONDS)

    def run(self, work: Callable[[int, VocabularyShard], object]) -> list:
        rows = -(-VOCABULARY // self.num_ranks)

        def run_rank(rank: int) -> object:
            first = rank * rows
            shard = VocabularyShard(first, min(rows, VOCABULARY - first), lambda tensor: self._gather(rank, tensor))
            return work(rank, shard)

        with ThreadPoolExecutor(self.num_ranks) as pool:
            return list(pool.map(run_rank, range(self.num_ranks)))

    def _gather(self, rank: int, tensor: Tensor) -> Tensor:
        self._slots[rank] = tensor
        self._barrier.wait()
        gathered = torch.stack(self._slots)
        self._barrier.wait()
        return gathered


def draw_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets, and an upstream gradient of both signs."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, upstream = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((NUM_TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (NUM_TOKENS,))
    )
    return hidden, 3 * weight, torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator), upstream


def take_rows(weight: Tensor, rank: int, num_ranks: int) -> Tensor:
    """A rank's rows, padded with rows that would win every softmax if they counted."""
    rows = -(-VOCABULARY // num_ranks)
    return pad(weight, (0, 0, 0, rows * num_ranks - VOCABULARY), value=100.0)[rank * rows : (rank + 1) * rows].clone()


@pytest.fixture(params=[23, 4], ids=lambda size: f"{size} tokens a block", autouse=True)
def _block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # A block has 4 rows of the weight; a rank with fewer rows has larger blocks, so that all have equally many.
    monkeypatch.setattr(module, "DEFAULT_LOSS_MEMORY", LossMemory(4 * 4 * request.param + 3))


TRANSFORMED = pytest.mark.parametrize(
    "transform", [PLAIN, LogitTransform(scale=0.5, softcap=4.0)], ids=["plain", "scaled and capped"]
)


@TRANSFORMED
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_losses_and_gradients_are_those_of_the_unsharded_vocabulary(num_ranks: int, transform: LogitTransform) -> None:
    hidden, weight, targets, upstream = draw_inputs()
    expected_hidden, expected_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = token_loss(expected_hidden, expected_weight, targets, transform=transform)
    expected.backward(upstream)

    def work(rank: int, shard: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
        rank_hidden = hidden.clone().requires_grad_()
        rank_weight = take_rows(weight, rank, num_ranks).requires_grad_()
        losses = token_loss(rank_hidden, rank_weight, targets, transform=transform, shard=shard)
        losses.backward(upstream)
        return losses.detach(), rank_hidden.grad, rank_weight.grad

    results = Ranks(num_ranks).run(work)
    for losses, _, _ in results:
        assert torch.equal(losses, results[0][0])
    torch.testing.assert_close(results[0][0], expected.detach())
    torch.testing.assert_close(sum(by_hidden for _, by_hidden, _ in results), expected_hidden.grad)
    by_weight = torch.cat([by_weight for _, _, by_weight in results])
    torch.testing.assert_close(by_weight[:VOCABULARY], expected_weight.grad)
    assert not by_weight[VOCABULARY:].any()


@TRANSFORMED
@pytest.mark.parametrize("moving", ["hidden", "weight", "both"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tangents_are_those_of_the_unsharded_vocabulary(num_ranks: int, moving: str, transform: LogitTransform) -> None:
    hidden, weight, targets, _ = draw_inputs()
    d_hidden, d_weight = torch.randn_like(hidden), torch.randn_like(weight)

    def dual(values: tuple[Tensor, Tensor], tangents: tuple[Tensor, Tensor]) -> list[Tensor]:
        is_moving = (moving != "weight", moving != "hidden")
        return [
            forward_ad.make_dual(x, d_x) if moves else x
            for x, d_x, moves in zip(values, tangents, is_moving, strict=True)
        ]

    def work(rank: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
        tangents = d_hidden, take_rows(d_weight, rank, num_ranks)
        values = hidden.clone(), take_rows(weight, rank, num_ranks)
        losses = token_loss(*dual(values, tangents), targets, transform=transform, shard=shard)
        return tuple(forward_ad.unpack_dual(losses))

    with forward_ad.dual_level():
        expected = forward_ad.unpack_dual(
            token_loss(*dual((hidden, weight), (d_hidden, d_weight)), targets, transform=transform)
        )
        results = Ranks(num_ranks).run(work)
        for losses, utilities in results:
            assert torch.equal(utilities, results[0][1])
            torch.testing.assert_close(losses, expected.primal)
            torch.testing.assert_close(utilities, expected.tangent)


@pytest.mark.parametrize(
    "transform",
    [PLAIN, LogitTransform(100.0), LogitTransform(0.5, 4.0), LogitTransform(100.0, 30.0)],
    ids=["plain", "scaled", "capped", "scaled and capped"],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_statistics_are_those_of_the_unsharded_vocabulary(num_ranks: int, transform: LogitTransform) -> None:
    hidden, weight, targets, _ = draw_inputs()

    def compute(part: Tensor, shard: VocabularyShard | None) -> list[Tensor]:
        return [
            loss_and_statistic(hidden, part, targets, name, transform=transform, shard=shard)[1]
            for name in ("entropy", "top_entropy", "concentration")
        ]

    expected = compute(weight, None)  # against plain PyTorch in test_prediction_statistics.py and test_token_loss.py
    results = Ranks(num_ranks).run(lambda rank, shard: compute(take_rows(weight, rank, num_ranks), shard))
    for values, right in zip(zip(*results, strict=True), expected, strict=True):
        assert all(torch.equal(value, values[0]) for value in values)
        torch.testing.assert_close(values[0], right, rtol=1e-10, atol=1e-12)  # logits near 2000, in fp64


def test_no_tokens_give_no_losses() -> None:
    hidden, weight, targets, _ = draw_inputs()
    results = Ranks(2).run(
        lambda rank, shard: token_loss(hidden[:0], take_rows(weight, rank, 2), targets[:0], shard=shard)
    )
    assert [losses.shape for losses in results] == [(0,), (0,)]
