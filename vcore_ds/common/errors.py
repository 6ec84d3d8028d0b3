"""The ways a command ends with one message and no traceback: a user's mistake, a run that failed, a stop request."""


class UserError(Exception):
    """Something the user gave cannot work: a recipe, a file, a folder, a setting.

    The message says everything (where, what was found, what was expected, what to do), so the command line prints it
    without a traceback and exits with `EXIT_CODE`.
    """

    EXIT_CODE = 2


class RunFailed(Exception):
    """The run cannot continue for a reason that its message explains in full; raised on all ranks alike.

    The command line prints the message alone: where the exception was raised says nothing more. Failures that nobody
    foresaw are other exceptions and keep their traceback; both exit with 1.
    """

    EXIT_CODE = 1


EXIT_STOPPED = 85
"""Exit code of a run that has saved and stopped on request; the same command resumes it."""


class RunStopped(Exception):
    """The run was asked to stop, and did at the end of a step, on all ranks together.

    The message is one line: why, after which step, where it is saved, how to resume.
    """

    EXIT_CODE = EXIT_STOPPED


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or the error's class where it has none, to quote in another message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def last_line(error: Exception) -> str:
    """The last line of the error's message, or its class where it has none: validators name the field there."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
