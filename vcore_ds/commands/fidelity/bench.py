"""What the fidelity command works with: the measured sequences on all ranks, and the recipe's own training."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from vcore_ds.commands.fidelity.report import NOTHING, Agreement, Estimate, ProbeLoss, agreement
from vcore_ds.config.schema import Recipe
from vcore_ds.distributed import layout
from vcore_ds.engine.zero3 import Engine
from vcore_ds.method.tokens import Tokens
from vcore_ds.models.loading import DTYPES
from vcore_ds.train.feed import Feed
from vcore_ds.train.settings import Schedule, step_settings
from vcore_ds.train.setup import build_estimator
from vcore_ds.train.step import take_direction
from vcore_ds.train.trainer import Trainer
from vcore_ds.train.weighting import token_weights
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import jvp_utilities
from vcore_ds.utility.finite_difference import choose_epsilon, perturbed_losses, signal_to_noise
from vcore_ds.utility.forward_mode import forward_mode, losses_and_utilities
from vcore_ds.utility.passes import measured_losses

REFERENCE_PRECISION = {"bf16": "fp32", "fp32": "fp64"}


class Bench:
    """The measured sequences, and what can be done with them. Tensors are over all ranks' tokens, on the CPU.

    All methods are collectives.
    """

    def __init__(self, engine: Engine, recipe: Recipe, feed: Feed, measured: Sequence[int]):
        """`recipe`: with utilities, see `with_utilities`."""
        self.engine, self.recipe, self.feed = engine, recipe, feed
        self.direction = Direction(engine)
        self._rounding_seed = recipe.run.seed if recipe.utility.rounding == "stochastic" else None
        self.reference_precision = REFERENCE_PRECISION[recipe.model.precision]
        self.batches = feed.batches(measured, feed.plan.utility_micro_batch_size_per_rank)
        ids = [torch.tensor(b.sequence_ids, dtype=torch.int64)[b.sequence_index()] for b in self.batches]
        self.index = torch.unique(self.over_ranks(ids), return_inverse=True)[1]
        """`[N]`, the measured sequence of each token, from 0."""

    def over_ranks(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts of all ranks in one, on the CPU; the same order on each call. Of ranks that share the rows of the
        measured sequences, the first counts."""
        is_first = layout.rank("sequence", self.batches[0].sequence_parallel) == 0
        found = layout.gather_objects("shards", torch.cat(list(parts)).cpu() if is_first else None)
        return torch.cat([of_rank for of_rank in found if of_rank is not None])

    def take_direction(self, ids: Sequence[int], loss: ProbeLoss | None = None) -> None:
        """Fills `self.direction` from the probe batch `ids`, as a step of the recipe would; `loss`: another
        `probe.loss` than the recipe's."""
        settings = step_settings(self.recipe)
        probe = settings.probe.model_copy(update={} if loss is None else {"loss": loss})
        take_direction(self.direction, replace(settings, probe=probe), self.feed.probe_batches(ids))

    def jvp(self, direction: Direction | None = None) -> Tensor:
        return self.over_ranks(jvp_utilities(self.engine, direction or self.direction, self.batches))

    def reference(self) -> tuple[Tensor, Tensor]:
        """Losses and utilities in `reference_precision`."""
        with forward_mode(self.engine, self.direction, DTYPES[self.reference_precision]):
            found = [losses_and_utilities(self.engine, batch) for batch in self.batches]
        return self.over_ranks([losses for losses, _ in found]), self.over_ranks([utilities for _, utilities in found])

    def losses(self) -> Tensor:
        """Losses of this rank's tokens only."""
        return torch.cat(measured_losses(self.engine, self.batches, batches_per_pass=1))

    def own_epsilon(self) -> float | None:
        """The recipe's epsilon, searched for where it says `auto`; None with jvp."""
        if self.recipe.utility.epsilon != "auto":
            return self.recipe.utility.epsilon
        return choose_epsilon(self.engine, self.direction, self.batches, self._rounding_seed)

    def finite_difference(self, epsilon: float, base: Tensor) -> tuple[Tensor, Estimate]:
        """Utilities, and all of the estimate but its agreement; `base`: `losses()` of this rank."""
        (of_below, changed_fraction), (of_above, _) = (
            perturbed_losses(self.engine, self.direction, self.batches, signed, 1, self._rounding_seed)
            for signed in (epsilon, -epsilon)
        )
        below, above = torch.cat(of_below), torch.cat(of_above)
        symmetric = self.over_ranks([above + below - 2 * base]).double()
        return self.over_ranks([(base - below) / epsilon]), Estimate(
            "finite_difference",
            epsilon,
            agreement=NOTHING,
            changed_fraction=changed_fraction,
            signal_to_noise=signal_to_noise(below, base, above),
            rounding_floor_nats=float((symmetric.square().mean() / 6).sqrt()),
        )

    def agreement(self, utilities: Tensor, reference: Tensor) -> Agreement:
        """With weights as the recipe's method makes them."""
        num_sequences, losses = int(self.index.max()) + 1, torch.zeros_like(reference)
        if self.recipe.method.base_measure == "dft":  # weights depend on losses then
            losses = self.over_ranks([self.losses()])
        weights, reference_weights = (
            token_weights(self.recipe.method, Tokens(losses.double(), self.index, num_sequences, s.double())).weights
            for s in (utilities, reference)
        )
        return agreement(utilities, reference, weights, reference_weights, self.index)


class Training:
    """The recipe's own training, a few steps at a time; its steps are those of a run."""

    def __init__(self, engine: Engine, recipe: Recipe, feed: Feed, schedule: Schedule):
        self.recipe = recipe
        self._engine, self._feed, self._schedule = engine, feed, schedule
        self.num_done = 0

    @cached_property
    def trainer(self) -> Trainer:
        """With a direction of its own, which may be kept from step to step; made when the first step is taken."""
        estimator = build_estimator(
            self.recipe, self._engine, batches_per_pass=self._feed.plan.batches_per_utility_pass
        )
        return Trainer(self._engine, estimator, step_settings(self.recipe), self._schedule)

    def train_until(self, step: int, say: Callable[[str], None]) -> None:
        while self.num_done < step:
            metrics = self.trainer.step(self.num_done, self._feed.step(self.num_done))
            self.num_done += 1
            say(f"training step {self.num_done}: loss {metrics.values['loss']:.4f}")
