"""The one exception for what a user can cause and mend."""


class UserError(Exception):
    """Something the user gave cannot work: a recipe, a file, a folder, a setting.

    The message is the whole story (where, what was found, what was expected, what to do), so the
    command line prints it without a traceback and exits with `EXIT_CODE`. Failures of the run
    itself are other exceptions and keep their traceback (exit code 1).
    """

    EXIT_CODE = 2
