"""The held-out loss of a set against plain transformers."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.helpers import tiny
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.method.objective import Normalization
from vcore_ds.training import console
from vcore_ds.training.loop import held_out_loss
from vcore_ds.utility.unsharded import unsharded_engine


@pytest.mark.parametrize("normalization", ["sequence", "token"])
def test_a_held_out_loss_is_the_mean_of_the_runs_normalization(normalization: Normalization) -> None:
    """Over sequences of 3 to 18 supervised tokens and one without any, in two micro-batches."""
    start_process_group(timeout_minutes=1)
    model, rows = tiny.qwen3(), tiny.make_batch(6)
    rows.labels[1, 6:], rows.labels[4] = -100, -100
    with torch.no_grad():
        logits = model.eval()(rows.input_ids).logits[:, :-1]
    losses = [
        cross_entropy(row[labels != -100], labels[labels != -100], reduction="none")
        for row, labels in zip(logits, rows.labels[:, 1:], strict=True)
        if (labels != -100).any()
    ]
    by_mean = {"sequence": torch.stack([loss.mean() for loss in losses]).mean(), "token": torch.cat(losses).mean()}
    assert len(losses) == 5 and abs(by_mean["sequence"] - by_mean["token"]) > 1e-3
    batches = [tiny.take_rows(rows, [0, 1, 4]), tiny.take_rows(rows, [2, 3, 5])]
    with unsharded_engine(model) as engine, console.progress("", 1) as progress:
        assert held_out_loss(engine, batches, normalization, progress) == pytest.approx(
            float(by_mean[normalization]), rel=1e-6
        )
