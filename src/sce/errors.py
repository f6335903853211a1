"""The one error that means: the user gave something that cannot work."""


class InputError(ValueError):
    """Input that cannot work; the message says what was wrong and what to do.

    The command line shows it as one line and exits with code 2; in Python it is a `ValueError`.
    """
