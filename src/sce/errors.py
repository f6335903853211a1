"""The error and the warning that are for users, and how their messages name settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_FLAGS = ContextVar("flags", default=False)


class InputError(ValueError):
    """Input that cannot work; the message says what was wrong and what to do.

    The command line shows it as one line and exits with code 2; in Python it is a `ValueError`.
    """


class TrainingWarning(UserWarning):
    """Training, or what was trained, is perhaps not as it was meant."""


@contextmanager
def settings_as_flags() -> Iterator[None]:
    """Let messages of the block name settings as the command line does."""
    token = _FLAGS.set(True)
    try:
        yield
    finally:
        _FLAGS.reset(token)


def named(setting: str, value: object = None, *, python: str = "") -> str:
    """A setting as the caller would give it: in Python, or as a flag.

    >>> named("batch_size"), named("training.clip_norm", 1)
    ('batch_size', 'clip_norm=1')
    >>> with settings_as_flags():
    ...     named("batch_size"), named("training.clip_norm", 1), named("resume", True)
    ('--batch-size', '--training.clip-norm 1', '--resume')
    """
    if _FLAGS.get():
        flag = "--" + setting.replace("_", "-")
        return flag if value is None or value is True else f"{flag} {value}"
    name = setting.rpartition(".")[2]
    return python or (name if value is None else f"{name}={value!r}")
