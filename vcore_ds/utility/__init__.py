"""The probe direction and every token's utility along it, on a model that stays sharded."""

from vcore_ds.utility.direction import Direction, Probe
from vcore_ds.utility.estimators import Estimator, ForwardMode, NoUtilities, jvp_utilities, why_not_fused
from vcore_ds.utility.finite_difference import FiniteDifference, choose_epsilon, perturbed_losses, signal_to_noise
from vcore_ds.utility.forward_mode import forward_mode, losses_and_utilities
from vcore_ds.utility.passes import measured_losses
from vcore_ds.utility.perturbation import perturbed

__all__ = [
    "Direction",
    "Estimator",
    "FiniteDifference",
    "ForwardMode",
    "NoUtilities",
    "Probe",
    "choose_epsilon",
    "forward_mode",
    "jvp_utilities",
    "losses_and_utilities",
    "measured_losses",
    "perturbed",
    "perturbed_losses",
    "signal_to_noise",
    "why_not_fused",
]
