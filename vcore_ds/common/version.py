"""The version of the package, which pyproject.toml reads too."""

__version__ = "0.8.0.dev0"  # between releases the next number, so that files and messages do not name the last one
