"""One fresh process for each measured cell, so that peaks of memory are true."""

import multiprocessing
import multiprocessing.connection
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]


def measure_cells(cells: Sequence[Row], measure: Callable[[Row], Row]) -> list[Row]:
    """Measure each cell in a process of its own; one that fails is a row that says how.

    The processes are forked, which saves importing torch again for each: the parent must not have
    computed anything, or touched a GPU, before.
    """
    rows = []
    for number, cell in enumerate(cells, start=1):
        print(f"[{number}/{len(cells)}] {cell} ", end="", file=sys.stderr, flush=True)
        result = _in_a_fresh_process(cell, measure)
        print({k: v for k, v in result.items() if k not in cell}, file=sys.stderr, flush=True)
        rows.append(cell | result)
    return rows


def _in_a_fresh_process(cell: Row, measure: Callable[[Row], Row]) -> Row:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work(send: multiprocessing.connection.Connection) -> None:
        try:
            send.send(measure(cell))
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            signs = ("out of memory", "not enough memory", "can't allocate memory")
            if isinstance(error, MemoryError) or any(sign in text for sign in signs):
                send.send({"failed": "out of memory"})
            else:
                traceback.print_exc()
                send.send({"failed": f"{type(error).__name__}: {text}"[:200]})

    process = context.Process(target=work, args=(sender,))
    process.start()
    sender.close()
    try:
        result: Row = receiver.recv()
    except EOFError:
        process.join()
        result = {"failed": f"the process ended with code {process.exitcode}"}
    process.join()
    return result
