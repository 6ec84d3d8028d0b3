"""Memory that code allocates, counted tensor by tensor, by the package's own counter."""

from vcore_ds.track.allocations import Allocations

__all__ = ["Allocations"]
