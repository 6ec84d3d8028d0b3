"""`vcore_ds.VcoreLoss` on replicas of a model (DDP): the step of one process on all sequences."""

from collections.abc import Iterable, Iterator
from unittest.mock import patch

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import vcore_ds
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.distributed import layout

NUM_STEPS = 5


def take_steps(rank: int | None, world_size: int = 2) -> list[torch.Tensor]:
    """Train on this rank's sequences; None for one process with all of them. Returns alpha, loss and the norm of the
    direction of each step, and at last the parameters.

    In the second step the second rank has no supervised token, in the fourth one of its two sequences has none. The
    second probe has no sequence for the second rank, the third one only one without supervised tokens.
    """
    model = tiny.qwen3().train()
    # Several groups of parameters, as other trainers have for weight decay.
    parameters = list(model.parameters())
    optimizer = AdamW([{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.1}], lr=1e-3)
    rows = slice(None) if rank is None else slice(rank, None, world_size)

    def take_rows(seed: int, without_tokens: Iterable[int] = ()) -> dict[str, torch.Tensor]:
        batch = tiny.make_batch(4, seed=seed)
        batch.labels[[*without_tokens]] = -100
        return {"input_ids": batch.input_ids[rows], "labels": batch.labels[rows]}

    def iterate_probes() -> Iterator[list[dict[str, torch.Tensor]]]:
        yield [take_rows(7)]
        yield [] if rank == 1 else [take_rows(8, (1, 3))]
        yield [take_rows(9, (1, 3))]

    vcore = vcore_ds.VcoreLoss(iterate_probes().__next__, kl_budget=0.5, every=2)
    replica = model if rank is None else DistributedDataParallel(model)
    results = []
    without_tokens = {1: (1, 3), 3: (3,)}
    for step in range(NUM_STEPS):
        vcore(replica, take_rows(step, without_tokens.get(step, ())), optimizer).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert vcore.direction is not None
        norm = torch.stack([v.norm() for v in vcore.direction.gradient.values()]).norm()
        results.append(torch.stack([vcore.alpha, vcore.uniform_loss, norm]).detach())
    with pytest.raises(vcore_ds.UserError, match="batch: found no supervised token"):  # on all ranks alike
        vcore(replica, take_rows(0, range(4)), optimizer)
    assert vcore_ds.VcoreLoss([take_rows(7)])(replica, take_rows(1), optimizer).isfinite()
    return [*results, torch.cat([p.detach().flatten() for p in model.parameters()])]


def take_steps_of_rank() -> list[torch.Tensor]:
    with patch.object(layout, "_meshes", {}):  # as in another trainer's process group, which this project did not start
        return take_steps(torch.distributed.get_rank())


def test_replicas_take_the_steps_of_one_process() -> None:
    *expected, parameters = take_steps(None)
    assert not torch.equal(expected[0][2], expected[2][2]) and torch.equal(expected[0][2], expected[1][2])
    for *steps, of_rank in run_ranks(take_steps_of_rank, 2):
        for step, wanted in zip(steps, expected, strict=True):
            torch.testing.assert_close(step, wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(of_rank, parameters, rtol=0, atol=1e-5)
