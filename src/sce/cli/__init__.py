"""The command `sce`: one verb per step of the job, each in a module of its own.

A command's module is imported only when that command is called, so `sce --help` stays quick and
`sce evaluate` never needs polars.
"""

import errno
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, get_args

import cyclopts
from cyclopts.help.formatters import DefaultFormatter

from sce import __version__
from sce.errors import InputError, InputWarning, RankError, settings_as_flags
from sce.memory import ran_out
from sce.progress import PipedConsole

VERBS = {
    "prepare": """Turn a log of interactions into a filtered, split and indexed dataset.
    sce prepare clicks.csv.gz --out data/clicks
    sce prepare 'logs/*.parquet' --user-column member --out data/shop
    sce prepare visits.csv --order rows --out data/visits
    sce prepare --partitions written-by-spark --memory 4GB --out data/large
    sce prepare ratings.dat --format movielens-1m --preset paper --out data/ml1m""",
    "synthesize": """Write a synthetic log with popularity skew and sequences that can be learned.
    sce synthesize --out data/made.parquet --titles data/titles.csv
    sce synthesize --items 1000000 --users 50000 --out data/large.parquet""",
    "plan": """Predict the memory of training with each loss, and what fits on a GPU.
    sce plan --items 1_000_000 --batch 128 --length 200 --dim 64 --memory 16GB
    sce plan --items 1_000_000 --memory 16GB --precision bf16
    sce plan --data data/clicks --memory 24GiB --json""",
    "train": """Train a model on a prepared dataset, and measure it on the test users.
    sce train data/clicks --out runs/clicks
    sce train data/clicks --out runs/clicks --resume
    sce train data/clicks --out runs/ce --loss ce --loss.chunk-size 4096
    sce train data/clicks --out runs/wide --config my.toml --model.dim 128
    sce train data/clicks-june --from runs/clicks --out runs/clicks-june""",
    "add-items": """Add new items to a run or an export, by similar items or content vectors.
    sce add-items runs/clicks items.jsonl --out runs/clicks-more
    sce add-items exports/clicks items.jsonl --out exports/clicks --force""",
    "evaluate": """Measure a run on the test users, beside the popularity baseline.
    sce evaluate runs/clicks
    sce evaluate runs/clicks --split validation --k 10 100 --json""",
    "recommend": """Recommend items for users of the dataset, or for any histories.
    sce recommend runs/clicks --histories histories.jsonl -k 10
    sce recommend runs/clicks --out everybody.parquet
    sce recommend runs/clicks --allow in-stock.txt --out everybody.jsonl""",
    "similar": """Name the items that are most similar to others.
    sce similar runs/clicks 42 7 -k 5
    sce similar runs/clicks 42 --allow in-stock.txt --format jsonl""",
    "export": """Write a run for use without torch: encoder, item table, ids; checked against it.
    sce export runs/clicks --out exports/clicks
    sce export runs/clicks --out exports/torch --format pt2""",
    "serve": """Serve a run or an export over HTTP, with a page to try it on.
    sce serve exports/clicks --port 8000
    sce serve runs/clicks --titles items.csv
    sce serve exports/clicks --host 0.0.0.0 --token-file token --watch""",
    "report": """Write a page about a run: curves, metrics, memory, settings, examples.
    sce report runs/clicks""",
    "sweep": """Train with many settings, each in a fresh process; resumable, within budgets.
    sce sweep experiments/pareto.toml --data data/clicks --out sweeps/clicks
    sce sweep experiments/mix.toml --out sweeps/made --jobs 4 --time-budget 10m
    sce sweep experiments/{mix,pareto}.toml --data data/clicks --out sweeps/both""",
    "compare": """Put runs side by side: tables with intervals, Pareto fronts, curves, on one page.
    sce compare runs/sce runs/ce
    sce compare sweeps/clicks
    sce compare sweeps/clicks --markdown table.md --csv all.csv --svg figures""",
    "datasets": """List the paper's datasets, where they are published, and how to prepare each.
    sce datasets
    sce datasets --json""",
}
"""Commands, each with a summary and examples: `sce NAME` calls NAME of sce.cli.NAME, _ for -."""


_RESERVE = [bytearray(2**20)]  # given back to say that memory has run out
_POWER = re.compile(r"^(-?\d+)[eE]\+?(\d{1,2})$")
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _convert(kind: Any, tokens: Sequence[cyclopts.Token]) -> Any:
    """Read options as usual, and 1e6; never round or beyond 64 bits: such numbers are mistakes."""
    if int in (kind, *get_args(kind)):
        for token in tokens:
            if "." in token.value:
                raise cyclopts.CoercionError(token=token, target_type=int)
        whole = (_POWER.sub(lambda of: of[1] + "0" * int(of[2]), token.value) for token in tokens)
        tokens = [token.evolve(value=value) for token, value in zip(tokens, whole, strict=True)]
    value = cyclopts.convert(kind, tokens)
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise cyclopts.CoercionError(token=tokens[0], target_type=int)
    return value


def _show_default(value: Any) -> str | None:
    return None if value is None or value is False else str(value)


class _HelpFormatter(DefaultFormatter):
    """Wraps help to the page: docstrings are wrapped to the width of their file."""

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        for entry in panel.entries:
            text = entry.description.primary_renderable
            text.plain = " ".join(text.plain.split())
        super().__call__(console, options, panel)


app = cyclopts.App(
    name="sce",
    help="Train next-item recommenders on huge catalogues with Scalable Cross-Entropy.",
    help_format="plaintext",
    help_formatter=_HelpFormatter(),
    help_epilogue="sce COMMAND --help explains a command by example. Every command takes --debug, "
    "which shows the traceback behind an error.",
    version=f"sce {__version__}",
    default_parameter=cyclopts.Parameter(
        negative=(), converter=_convert, show_default=_show_default
    ),
    suppress_keyboard_interrupt=False,
)
for position, (verb, text) in enumerate(VERBS.items()):
    name, (summary, _, examples) = verb.replace("-", "_"), text.partition("\n")
    app.command(
        f"sce.cli.{name}:{name}",
        name=verb,
        help=summary,
        help_epilogue=f"Examples:\n\n{examples}",
        sort_key=position,
    )


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show each of our warnings as one line; those of others as ever."""
    usual, said = warnings.showwarning, set()

    def show(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if not issubclass(category, InputWarning):
            usual(message, category, *args, **kwargs)
        elif str(message) not in said:
            said.add(str(message))
            say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", InputWarning)
        warnings.showwarning = show
        yield


@settings_as_flags()
@_plain_warnings()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 2 on wrong input, 130 after Ctrl-C."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in tokens
    tokens = [token for token in tokens if token != "--debug"]
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    try:
        if any("\0" in token for token in tokens):
            raise InputError("a NUL byte is no part of any file name or option")
        options: dict[str, Any] = {"exit_on_error": False, "print_error": False}
        options |= {"console": PipedConsole(), "result_action": "return_value"}
        code = app(tokens, **options)
        if sys.stdout is not None:
            sys.stdout.flush()  # here a reader that went away is noticed in time
    except cyclopts.CycloptsError as error:
        if debug:
            raise
        command = "sce " + tokens[0] if tokens and tokens[0] in VERBS else "sce"
        return _complain(f"{error} (see: {command} --help)")
    except BrokenPipeError:
        return 141  # the reader of our output (head, less) went away: not an error of ours
    except KeyboardInterrupt as interruption:
        say("interrupted")
        return int(getattr(interruption, "exit_code", 130))
    except (InputError, RankError, OSError, UnicodeEncodeError) as error:
        if debug:
            raise
        return _complain(_explain(error))
    except BaseException as error:  # panics of polars are no Exceptions
        _RESERVE.clear()
        reason = ran_out(error)
        if not debug and "torch" in (getattr(e, "name", "") for e in (error, error.__cause__)):
            return _complain(
                "torch is not installed; install it as README.md says, or use an export: sce serve "
                "and sce add-items take one without torch"
            )
        if debug or reason is None:
            raise
        remedy = "free some, take less at once, or use a machine that has more"
        return _complain(f"memory ran out ({reason}); {remedy}")
    finally:
        _leave_dead_streams()
    return int(code or 0)


def _explain(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:200]!a} cannot be written as {error.encoding}; rename it"
    # Errors of files have their names.
    if isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITABLE:
        return f"cannot write to standard output: {error.strerror}"
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return "the current directory was deleted; change to one that is there"
    return str(error)


def _complain(message: str) -> int:
    words = (
        word if len(word) < 1000 else f"{word[:200]}...{word[-20:]}" for word in message.split()
    )
    say("error: " + " ".join(words))
    return 2


def say(line: str) -> None:
    """Write a line to standard error, if anybody reads it.

    Names of files and ids may hold sequences that a terminal obeys: they are shown, not sent.
    """
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    if sys.stderr is not None:  # else print would take standard output
        with suppress(OSError):
            print(f"sce: {line}", file=sys.stderr, flush=True)


@contextmanager
def telling() -> Iterator[None]:
    """Print about what is done and kept: an output that cannot be written does not undo it."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        say(f"done, but {_explain(error)}")
        _leave_dead_streams()


def _leave_dead_streams() -> None:
    """Redirect streams without a reader, which the interpreter would stumble over at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
