"""Exceptions that end a command with one message and no traceback: a user's mistake, a failed run, a stop request."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake in the user's input: a recipe, a file, a folder, a setting. The message is complete (where, what was
    found, what is expected, what to do), so the command line prints it without a traceback and exits with
    `EXIT_CODE`."""

    EXIT_CODE = 2


class Problems(list[str]):
    """Messages of several UserErrors, which are raised as one."""

    @contextmanager
    def collect(self) -> Iterator[None]:
        """A context that adds the UserError of its block."""
        try:
            yield
        except UserError as error:
            self.append(str(error))

    def raise_all(self) -> None:
        if self:
            raise UserError("\n".join(dict.fromkeys(self)))


class RunFailed(Exception):
    """The run cannot continue, for the reason in the message, which alone is printed; raised on all ranks alike.
    Unexpected failures are other exceptions, with a traceback; both exit with 1."""

    EXIT_CODE = 1


class OutOfMemory(Exception):
    """This rank is out of memory, perhaps alone; the message, with what needs less, is printed on it."""

    EXIT_CODE = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of PyTorch's allocator for a GPU or for CPUs, or of Python's; imports no torch."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"OutOfMemoryError", "MemoryError"}) or "DefaultCPUAllocator: can't allocate" in str(error)


EXIT_STOPPED = 85  # exit code of a run that was stopped on request, after saving; the same command resumes it


class RunStopped(Exception):
    """The run stopped on request at the end of a step, on all ranks together. The message is one line: why, after which
    step, where it is saved, how to resume."""

    EXIT_CODE = EXIT_STOPPED


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or its class without one, to quote in another message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def last_line(error: Exception) -> str:
    """The last line of the error's message, where validators name the field; or its class without one."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
