"""The command `sce`: one verb per step of the job, each in a module of its own.

A command's module is imported only when that command is called, so `sce --help` stays quick and
`sce evaluate` never needs polars.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, get_args

import cyclopts

from sce import __version__
from sce.errors import InputError


class Verb(NamedTuple):
    """A command: `sce NAME` calls the function NAME of the module sce.cli.NAME."""

    name: str
    summary: str
    examples: str


VERBS = [
    Verb(
        "prepare",
        "Turn a log of interactions into a filtered, split and indexed dataset.",
        """
        sce prepare clicks.csv.gz --out data/clicks
        sce prepare 'logs/*.parquet' --user-column member --out data/shop
        sce prepare ratings.dat --format movielens-1m --preset paper --out data/ml1m
        """,
    ),
    Verb(
        "synthesize",
        "Write a synthetic log with popularity skew and sequences that can be learned.",
        """
        sce synthesize --out data/made.parquet
        sce synthesize --items 1000000 --users 50000 --out data/large.parquet
        """,
    ),
    Verb(
        "plan",
        "Predict the memory of training with each loss, and what fits on a GPU.",
        """
        sce plan --items 1_000_000 --batch 128 --length 200 --dim 64 --memory 16GB
        sce plan --items 1_000_000 --memory 16GB --precision bf16
        sce plan --data data/clicks --memory 24GiB --json
        """,
    ),
    Verb(
        "train",
        "Train a model on a prepared dataset, and measure it on the test users.",
        """
        sce train data/clicks --out runs/clicks
        sce train data/clicks --out runs/clicks --resume
        sce train data/clicks --out runs/ce --loss ce --loss.chunk-size 4096
        sce train data/clicks --out runs/wide --config my.toml --model.dim 128
        """,
    ),
    Verb(
        "evaluate",
        "Measure a run on the test users, beside the popularity baseline.",
        """
        sce evaluate runs/clicks
        sce evaluate runs/clicks --split validation --k 10 100 --json
        """,
    ),
    Verb(
        "recommend",
        "Recommend items for users of the dataset, or for any histories.",
        """
        sce recommend runs/clicks --histories histories.jsonl -k 10
        sce recommend runs/clicks --out everybody.parquet
        """,
    ),
    Verb(
        "report",
        "Write a page about a run: curves, metrics, memory, settings, examples.",
        """
        sce report runs/clicks
        """,
    ),
    Verb(
        "sweep",
        "Train with many settings, each in a fresh process; resumable, within budgets.",
        """
        sce sweep experiments/pareto.toml --data data/clicks --out sweeps/clicks
        sce sweep experiments/mix.toml --out sweeps/made --jobs 4 --time-budget 10m
        sce sweep experiments/{main-table,pareto}.toml --data data/clicks --out sweeps/clicks
        """,
    ),
    Verb(
        "compare",
        "Compare the runs of sweeps: Pareto fronts, tables, curves, on one page.",
        """
        sce compare sweeps/clicks
        sce compare sweeps/clicks --markdown table.md --csv all.csv --svg figures
        """,
    ),
    Verb(
        "datasets",
        "List the paper's datasets, where their owners publish them, and how to prepare each.",
        """
        sce datasets
        sce datasets --json
        """,
    ),
]


def _convert(kind: Any, tokens: Sequence[cyclopts.Token]) -> Any:
    """Read options as usual, but never round: one and a half epochs are a mistake."""
    if int in (kind, *get_args(kind)):
        for token in tokens:
            if "." in token.value:
                raise cyclopts.CoercionError(token=token, target_type=int)
    return cyclopts.convert(kind, tokens)


app = cyclopts.App(
    name="sce",
    help="Train next-item recommenders on huge catalogues with Scalable Cross-Entropy.",
    help_format="plaintext",
    help_epilogue="sce COMMAND --help explains a command by example. Every command takes --debug, "
    "which shows the traceback behind an error.",
    version=f"sce {__version__}",
    default_parameter=cyclopts.Parameter(negative=(), converter=_convert),
    suppress_keyboard_interrupt=False,
)
for position, verb in enumerate(VERBS):
    app.command(
        f"sce.cli.{verb.name}:{verb.name}",
        name=verb.name,
        help=verb.summary,
        help_epilogue="Examples:\n\n"
        + "\n".join("    " + line.strip() for line in verb.examples.strip().splitlines()),
        sort_key=position,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 2 on wrong input, 130 when interrupted."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in tokens
    tokens = [token for token in tokens if token != "--debug"]
    try:
        code = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        if sys.stdout is not None:
            sys.stdout.flush()  # here a reader that went away is noticed in time
    except cyclopts.CycloptsError as error:
        if debug:
            raise
        verbs = [verb.name for verb in VERBS]
        help_of = f"sce {tokens[0]} --help" if tokens[:1] and tokens[0] in verbs else "sce --help"
        return _complain(f"{error} (see: {help_of})")
    except BrokenPipeError:
        return 141  # the reader of our output (head, less) went away: not an error of ours
    except KeyboardInterrupt:
        _say("sce: interrupted")
        return 130
    except (InputError, OSError) as error:
        if debug:
            raise
        return _complain(str(error))
    finally:
        _leave_dead_streams()
    return int(code or 0)


def _complain(message: str) -> int:
    _say("sce: error: " + " ".join(message.split()))
    return 2


def _say(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _leave_dead_streams() -> None:
    """Where a stream has no reader any more, let the interpreter not stumble over it at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
