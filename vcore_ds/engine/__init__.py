"""The sharded engine: the only place that imports deepspeed and torch.distributed."""

from . import distributed, watchdog  # distributed first: it prepares the process for importing deepspeed
from .direction import Direction, count_globally, probe_direction
from .export import save_hugging_face
from .forward_mode import forward_mode, losses_and_utilities
from .loading import sharded_loading
from .optimizer import build_optimizer
from .perturb import perturbed
from .reference import log_probabilities, reference_log_probabilities
from .stops import Stops
from .utilities import (
    FiniteDifferenceUtilities,
    JvpUtilities,
    choose_epsilon,
    finite_difference_utilities,
    jvp_utilities,
    measured_losses,
    perturbed_losses,
    signal_to_noise,
)
from .zero3 import Engine, NonFiniteGradient

__all__ = [
    "Direction",
    "Engine",
    "FiniteDifferenceUtilities",
    "JvpUtilities",
    "NonFiniteGradient",
    "Stops",
    "build_optimizer",
    "choose_epsilon",
    "count_globally",
    "distributed",
    "finite_difference_utilities",
    "forward_mode",
    "jvp_utilities",
    "log_probabilities",
    "losses_and_utilities",
    "measured_losses",
    "perturbed",
    "perturbed_losses",
    "probe_direction",
    "reference_log_probabilities",
    "save_hugging_face",
    "sharded_loading",
    "signal_to_noise",
    "watchdog",
]
