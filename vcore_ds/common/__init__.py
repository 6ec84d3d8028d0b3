"""Shared by all packages: errors, progress, paths, locks, text, random streams; and the version, for pyproject.toml."""

__version__ = "0.8.0"  # between releases the next number with .dev0, so that files do not name the last one
