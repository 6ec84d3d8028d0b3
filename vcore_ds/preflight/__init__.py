"""Whether all nodes are fit for a run, before its ranks start."""

from .run import preflight

__all__ = ["preflight"]
