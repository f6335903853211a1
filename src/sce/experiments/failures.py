"""The reason of a failed run, from its exit status and the end of its output."""

import re

OUT_OF_MEMORY, DIVERGED, KILLED, ERROR = "out of memory", "diverged", "killed", "error"

_MEMORY = re.compile(
    r"memory ran out|out of memory|OutOfMemoryError|can't allocate memory|ALLOC_FAILED"
    r"|Unable to allocate|MemoryError|Memory allocation (still )?failed|does not fit into memory",
    re.IGNORECASE,
)
_DIVERGENCE = re.compile(r"the loss became|stopped being numbers")
# Of a state that is not kept: a sweep takes up a run again by itself, or not at all.
_ADVICE = re.compile(r", with --(resume to go on from the last good state|force to begin anew).*")
# Options of `sce train` that its messages advise, as a sweep has them: settings, and its own flag.
_OPTIONS = {
    "--loss": "loss.name",
    "--epochs": "training.epochs",
    "--batch-size": "training.batch_size",
    "--learning-rate": "training.learning_rate",
    "--device": "training.device",
    "--force": "--retry-failed",
}
_OPTION = re.compile(r"--[a-z][a-z.-]*[a-z]")
_LONGEST = 400  # letters of a message


def explain_failure(status: int, said: str) -> tuple[str, str]:
    """Return the kind of a failure, and a message.

    >>> explain_failure(2, "sce: error: memory ran out (Tried to allocate 3 GiB)")
    ('out of memory', 'memory ran out (Tried to allocate 3 GiB)')

    Args:
        status: Of the process; negative when a signal ended it.
        said: Its output.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it said nothing"]
    errors = [line for line in lines if line.startswith("sce: error: ")]
    message = (errors or lines)[-1].removeprefix("sce: error: ")
    message = _OPTION.sub(_as_setting, _ADVICE.sub("", message))
    message = message if len(message) <= _LONGEST else message[:_LONGEST] + " ..."
    if status < 0:
        why = ": perhaps the system ran out of memory" if status == -9 else ""
        return KILLED, f"ended by signal {-status}{why}; last words: {message}"
    ending = "\n".join(lines[-5:])
    if _MEMORY.search(ending):
        return OUT_OF_MEMORY, message
    return DIVERGED if _DIVERGENCE.search(ending) else ERROR, message


def _as_setting(option: re.Match[str]) -> str:
    """An option of `sce train` as the settings file and --set name it; others as they are."""
    if option[0].startswith(("--model.", "--loss.", "--training.")):
        return option[0].removeprefix("--").replace("-", "_")
    return _OPTIONS.get(option[0], option[0])
