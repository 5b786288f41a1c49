class UserError(Exception):
    """Wrong usage. Commands print it as one line, `error: ...`, and exit with 2."""

    exit_code = 2


class RunError(Exception):
    """A correct command that could not finish. Commands print one line and exit with 1."""

    exit_code = 1


class WriteError(RunError):
    """A file could not be written: no space, no permission."""
