"""Standard output and error that are closed, full, or of an encoding without the characters of our messages."""

import io
import os
import sys
from contextlib import suppress


def repair_standard_streams() -> None:
    """Open streams that the caller has closed, on /dev/null: the next file that is opened would have their number, and
    libraries would print into it. Let the others escape what their encoding lacks (LANG, PYTHONIOENCODING) instead of
    raising UnicodeEncodeError in the middle of a run. Calling it again has no effect."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the process's life)
        elif name != "stdin" and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            with suppress(OSError):  # a file's stream whose descriptor has become a terminal's cannot seek
                stream.reconfigure(errors="backslashreplace")


def find_output_error() -> OSError | None:
    """Find out why standard output takes no text, such as a full disk, and drop what is written to it from now on; None
    if it takes some."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")  # without a buffer, the text that failed is gone
    except io.UnsupportedOperation:  # no file
        return None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return error
    return None
