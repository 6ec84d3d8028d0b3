"""The version of the package, which pyproject.toml reads too."""

__version__ = "0.7.0"
