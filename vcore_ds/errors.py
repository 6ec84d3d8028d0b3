"""How a command ends without a traceback: a mistake that the user can fix, or a stop request."""


class UserError(Exception):
    """Something the user gave cannot work: a recipe, a file, a folder, a setting.

    The message says everything (where, what was found, what was expected, what to do), so the command line prints it
    without a traceback and exits with `EXIT_CODE`. Failures of the run itself are other exceptions and keep their
    traceback (exit code 1).
    """

    EXIT_CODE = 2


EXIT_STOPPED = 85
"""Exit code of a run that has saved and stopped on request; the same command resumes it."""


class RunStopped(Exception):
    """The run was asked to stop, and did at the end of a step, on all ranks together.

    The message is one line: why, after which step, where it is saved, how to resume.
    """

    EXIT_CODE = EXIT_STOPPED


def first_line(error: Exception) -> str:
    """First line of an error's message, or its kind where it has none: what fits into a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
