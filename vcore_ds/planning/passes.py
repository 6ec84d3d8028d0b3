"""The passes of an optimizer step, each in multiples of what a plain forward does."""

from collections.abc import Sequence
from dataclasses import dataclass

from vcore_ds.planning.flops import forward_flops
from vcore_ds.planning.memory_settings import MemorySettings
from vcore_ds.planning.model_shape import ModelShape


@dataclass(frozen=True)
class PassWork:
    """What one micro-step of a pass does, in multiples of what a plain forward does."""

    linear: int
    """Products of linear layers."""
    attention: int
    """Products of attention."""
    gathers: int
    """Gathers of all parameters."""
    exchanges: int
    """Exchanges of a forward within a sequence-parallel group."""
    runs: int
    """Runs through the layers."""
    tangent_gathers: int = 0
    """Gathers of the direction of all trained parameters."""
    reduces: bool = False
    """Whether the gradient is reduced."""

    def exchanges_of_hidden_states(self, num_layers: int, *, is_full: bool) -> tuple[int, int]:
        """Exchanges over a tensor-parallel group, of hidden states of all tokens or, where values and tangents
        travel together, of twice as many: how many there are, and how many hidden states they hold of each token.

        A layer gathers and scatters before and after attention and MLP, once more in a backward, and gathers the inputs
        of trained weights again; the embedding and the head have one each. tests/dist/test_megatron.py counts them.

        Args:
            is_full: all parameters are trained; nothing is sent to a frozen embedding.
        """
        in_layers = 4 * self.exchanges + (2 if self.reduces and is_full else 0)
        at_the_ends = 2 * self.runs - (1 if self.reduces and not is_full else 0)
        held = num_layers * in_layers + at_the_ends
        return held - self.tangent_gathers * (4 * num_layers + 2), held

    def __add__(self, other: "PassWork") -> "PassWork":
        return PassWork(
            self.linear + other.linear,
            self.attention + other.attention,
            self.gathers + other.gathers,
            self.exchanges + other.exchanges,
            self.runs + other.runs,
            self.tangent_gathers + other.tangent_gathers,
            self.reduces or other.reduces,
        )


FORWARD = PassWork(1, 1, 1, 1, 1)


def tangents_beside(settings: MemorySettings) -> PassWork:
    """What tangents add to a forward."""
    # Products of a weight with the input's tangent and, where it is trained, of its tangent with the input.
    linear = 2 if settings.adapters is None else 1
    return PassWork(linear, 2, gathers=0, exchanges=1, runs=1, tangent_gathers=1)


@dataclass(frozen=True)
class StepFlops:
    """FLOP of the products of an optimizer step, over all ranks."""

    training: float
    """Forward and backward of the main batch, as in plain fine-tuning."""
    extra: float
    """All others: probe, tangents, forwards for utilities or of a reference."""

    @property
    def total(self) -> float:
        """What plain fine-tuning does, and what the method adds."""
        return self.training + self.extra


@dataclass(frozen=True)
class StepPasses:
    """The passes of an optimizer step; None for one that it does not have."""

    training: PassWork
    """What plain fine-tuning does with the main batch."""
    main: PassWork
    """The same, with the tangents where they travel along."""
    probe: PassWork | None = None
    utility: PassWork | None = None
    """A pass of its own over the main batch."""
    steps_per_probe: int = 1

    @classmethod
    def of(cls, settings: MemorySettings, *, reference_forwards: int = 0, steps_per_probe: int = 1) -> "StepPasses":
        """Args:
        reference_forwards: forwards over the main batch that serve no utilities, such as a reference model's.
        """
        # A backward takes the products for the inputs and, where weights are trained, those for the weights.
        is_full, again = settings.adapters is None, int(settings.is_checkpointed)
        linear = (3 if is_full else 2) + again
        train = PassWork(linear, 3 + again, gathers=2, exchanges=2 + again, runs=2, reduces=True)
        tangents = tangents_beside(settings)
        forwards = reference_forwards
        utility: PassWork | None = None
        if settings.estimator == "jvp" and not settings.is_fused:
            utility = FORWARD + tangents
        elif settings.estimator == "finite_difference":
            # With dropout the main forward has a mask, and cannot serve as the loss before the perturbation.
            forwards += 2 if settings.adapters is not None and settings.adapters.has_dropout else 1
        for _ in range(forwards):
            utility = FORWARD if utility is None else utility + FORWARD
        has_probe = settings.estimator is not None and settings.probe_tokens > 0
        main = train + tangents if settings.is_fused else train
        return cls(train, main, train if has_probe else None, utility, steps_per_probe)

    def flops(self, shape: ModelShape, main: Sequence[int], probe: Sequence[int]) -> StepFlops:
        """FLOP of a step with batches of sequences of so many tokens; without a probe batch none for the probe."""

        def of(work: PassWork | None, lengths: Sequence[int]) -> float:
            if work is None:
                return 0.0
            return forward_flops(shape, lengths, linear=work.linear, attention=work.attention)

        training = of(self.training, main)
        return StepFlops(training, of(self.main, main) - training + of(self.utility, main) + of(self.probe, probe))
