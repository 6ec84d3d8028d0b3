"""Whether utilities are derivatives, asked of the loaded model itself before a run's first step.

Forward mode needs a rule for every operation of an architecture, and a tangent for every trained parameter that one
reads. Where one is missing, silently, all utilities are wrong. Reverse mode, which trains the model, needs other rules
and other hooks. Along the gradient of a loss, the derivative of that loss is the gradient's squared norm, so that the
two modes check each other: one short sequence, forward and backward, then forward with tangents.
"""

import time

import torch

from vcore_ds.data.batches import Batch, collate
from vcore_ds.distributed.positions import mark
from vcore_ds.engine.zero3 import Engine
from vcore_ds.errors import UserError, first_line
from vcore_ds.models.architecture_check import instead_of_forward_mode
from vcore_ds.track.console import Console
from vcore_ds.train.feed import Feed
from vcore_ds.train.start_check import ending
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import Estimator, ForwardMode

NUM_TOKENS = 32

TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4, torch.float64: 1e-6}
"""Largest difference that rounding explains, relative to the squared norm, by the least precise of the parameters'
dtypes."""


def check_derivatives(engine: Engine, estimator: Estimator, feed: Feed, console: Console) -> None:
    """Compares both modes on the end of the first training sequence, the same on all ranks. A collective; without
    utilities by forward mode nothing is done.

    Parameters, the optimizer's state and the estimator's direction are not affected.

    Raises:
        UserError: on all ranks alike, where the modes differ.
    """
    if not isinstance(estimator, ForwardMode):
        return
    mark("checking derivatives")
    started = time.perf_counter()
    try:
        expected, found = along_own_gradient(engine, estimator, short_batch(engine, feed))
    except RuntimeError as error:  # NotImplementedError is one
        if "jvp" not in str(error) and "forward AD" not in str(error):
            raise
        raise UserError(
            f"utility.estimator: found jvp together with {engine.module.base.config.model_type}, which has an "
            f"operation without a forward-mode derivative ({first_line(error)})"
            f"{instead_of_forward_mode(engine.module.base.config)}"
        ) from None
    difference = abs(found / expected - 1) if expected else 0.0
    # Adapters may be in fp32 on a model in bf16.
    tolerance = max(TOLERANCE[parameter.dtype] for parameter in engine.module.parameters())
    if not difference <= tolerance:  # nan is wrong too
        raise UserError(
            f"utility.estimator: found jvp together with {engine.module.base.config.model_type}, of which forward-mode "
            f"derivatives are wrong: the loss of a short sequence along its own gradient changes by {found:.6g}, "
            f"expected the gradient's squared norm, {expected:.6g}, within {tolerance:g} of it"
            f"{instead_of_forward_mode(engine.module.base.config)}"
        )
    console.note(
        f"Check of the utilities: forward and reverse mode differ by {difference:.1g} of the derivative, in "
        f"{time.perf_counter() - started:.1f} s"
    )


def along_own_gradient(engine: Engine, estimator: ForwardMode, batch: Batch) -> tuple[float, float]:
    """The squared norm of the gradient of the mean loss of `batch`, the same on all ranks, and the mean utility along
    it. A collective."""
    direction = Direction(engine)
    direction.take([batch], normalization="sequence", clip=None)
    assert direction.norm is not None
    main = estimator.along(direction)
    with engine.without_dropout(), engine.accumulation(1):
        losses, utilities = main.begin([batch])(0)
        assert utilities is not None
        engine.backward(0.0 * losses.sum())  # ZeRO-3 expects one behind a forward with a graph
    return direction.norm**2, float(utilities.double().mean())


def short_batch(engine: Engine, feed: Feed) -> Batch:
    """The end of the first sequence."""
    # Reverse mode stops at the input embedding of this token (`torch.nn.Embedding(padding_idx=...)`), forward mode
    # does not; where embeddings are tied, both are right.
    padding = getattr(engine.module.base.config.get_text_config(), "pad_token_id", None)
    return collate([ending(feed, 0, NUM_TOKENS, left_out=padding)], feed.pad_token_id)
