"""Files that a recipe consists of: where the shipped ones are, and reading any of them within bounds."""

import os
import stat
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "shipped"
"""Where pyproject.toml puts the recipes and the DeepSpeed JSON in a wheel; a checkout has no such folder."""

SHIPPED_RECIPES = _INSTALLED / "recipes" if _INSTALLED.is_dir() else _PACKAGE.parent / "launch_scripts" / "recipes"
"""The folder below which `methods/dft.yaml` and the like are found from any working directory."""

SHIPPED_DEEPSPEED_CONFIGS = (_INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent) / "ds_configs"
"""The folder of the DeepSpeed JSON; `ds_configs/NAME.json` is found in its parent."""

LARGEST_FILE_BYTES = 2**17
"""Larger files are refused: a recipe has 1 to 3 kB, and PyYAML reads about 0.1 MB a second."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnreadableFile(Exception):
    """A path that leads to no text of a sensible size; the message begins with `found` or `cannot be read`."""

    place = ""
    """`:LINE:COLUMN`, from 1, of what cannot be read in the text; empty where it is the whole file."""


def read_text(path: Path) -> str:
    """The text of a regular UTF-8 file of at most `LARGEST_FILE_BYTES`.

    Anything else is refused before it is opened: reading a pipe would wait for its writer.

    Raises:
        FileNotFoundError: nothing has that name.
        UnreadableFile: with the reason.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise UnreadableFile(f"found {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
        if len(data) > LARGEST_FILE_BYTES:
            raise UnreadableFile(f"found more than {LARGEST_FILE_BYTES:,} bytes")
        return data.decode("utf-8")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"found bytes that are not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # NUL, or a character that no file name holds
        raise UnreadableFile(f"found no path: {error}") from None


def expand_home(name: str) -> str:
    """A path with `~` and `~user` expanded; unchanged where there is no such user."""
    try:
        return os.path.expanduser(name)
    except ValueError:  # no user's name holds NUL
        return name


def resolve(path: Path) -> Path:
    """The absolute path without symbolic links. Unlike `Path.resolve`, takes a circular link, and text that is no path,
    as it is."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):
        return path
