"""The command `sce`: one verb per step of the job, each in a module of its own.

A command's module is imported only when that command is called, so `sce --help` stays quick and
`sce evaluate` never needs polars.
"""

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

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
        "datasets",
        "List the paper's datasets, where their owners publish them, and how to prepare each.",
        """
        sce datasets
        sce datasets --json
        """,
    ),
]

app = cyclopts.App(
    name="sce",
    help="Train next-item recommenders on huge catalogs with Scalable Cross-Entropy.",
    help_format="plaintext",
    help_epilogue="sce COMMAND --help explains a command by example. Every command takes --debug, "
    "which shows the traceback behind an error.",
    version=f"sce {__version__}",
    default_parameter=cyclopts.Parameter(negative=()),
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
        # The reader of our output (head, less) went away: not an error of ours, and no reason for
        # the interpreter to complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("sce: interrupted", file=sys.stderr)
        return 130
    except (InputError, OSError) as error:
        if debug:
            raise
        return _complain(str(error))
    return int(code or 0)


def _complain(message: str) -> int:
    print("sce: error: " + " ".join(message.split()), file=sys.stderr)
    return 2
