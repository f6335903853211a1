"""One fresh process for each measured cell, so that peaks of memory are true."""

import multiprocessing
import multiprocessing.connection
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rows import keep, provenance

Row = dict[str, Any]


def measure_cells(
    name: str,
    cells: Sequence[Row],
    measure: Callable[[Row], Row],
    *,
    packages: Sequence[str],
    beside: Sequence[str],
    to: Path | None = None,
) -> list[Row]:
    """Measure each cell in a process of its own; one that fails is a row that says how.

    Each row is kept as soon as it is there, with what it was measured on, in `results/NAME.jsonl`.
    The processes are forked, which saves importing torch again for each: the parent must not have
    computed anything, or touched a GPU, before.

    Args:
        name: Of the results.
        cells: What is to be measured.
        measure: From a cell to what was found.
        packages: Those whose versions a row tells.
        beside: The fields in which an older row agrees with the new one that replaces it.
        to: Another file for the rows.
    """
    rows, path = [], None
    for number, cell in enumerate(cells, start=1):
        print(f"[{number}/{len(cells)}] {cell} ", end="", file=sys.stderr, flush=True)
        result, where = _in_a_fresh_process(cell, measure, packages)
        print({k: v for k, v in result.items() if k not in cell}, file=sys.stderr, flush=True)
        rows.append(cell | result)
        path = keep(name, [cell | result | where], to=to, beside=beside)
    print(f"{len(rows)} rows in {path}", file=sys.stderr)
    return rows


def _in_a_fresh_process(
    cell: Row, measure: Callable[[Row], Row], packages: Sequence[str]
) -> tuple[Row, Row]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work(send: multiprocessing.connection.Connection) -> None:
        try:
            result = measure(cell)
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            signs = ("out of memory", "not enough memory", "can't allocate memory")
            if isinstance(error, MemoryError) or any(sign in text for sign in signs):
                result = {"failed": "out of memory"}
            else:
                traceback.print_exc()
                result = {"failed": f"{type(error).__name__}: {text}"[:200]}
        send.send((result, provenance(*packages)))  # here, where a GPU may be asked

    process = context.Process(target=work, args=(sender,))
    process.start()
    sender.close()
    try:
        found: tuple[Row, Row] = receiver.recv()
    except EOFError:
        process.join()
        found = {"failed": f"the process ended with code {process.exitcode}"}, {}
    process.join()
    return found
