"""The command `vcore-ds fidelity`: how right the utilities of a recipe are."""

from .measure import measure_fidelity
from .plan import FidelityOptions

__all__ = ["FidelityOptions", "measure_fidelity"]
