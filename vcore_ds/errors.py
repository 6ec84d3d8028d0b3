"""How a command ends without a traceback: something the user can mend, or a stop that was asked for."""


class UserError(Exception):
    """Something the user gave cannot work: a recipe, a file, a folder, a setting.

    The message is the whole story (where, what was found, what was expected, what to do), so the
    command line prints it without a traceback and exits with `EXIT_CODE`. Failures of the run
    itself are other exceptions and keep their traceback (exit code 1).
    """

    EXIT_CODE = 2


EXIT_STOPPED = 85
"""Exit code of a run that was asked to stop and has saved what there was to save: start it again and it goes on."""


class RunStopped(Exception):
    """The run was asked to stop, and did at the end of a step, on all ranks together.

    The message is one line: why, after which step, where it is saved, how to go on.
    """

    EXIT_CODE = EXIT_STOPPED


def first_line(error: Exception) -> str:
    """Of its message, or its kind where it has none: what fits into a message of our own."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
