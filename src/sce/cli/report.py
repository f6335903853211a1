"""`sce report`: a run as one page of HTML."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from sce.cli import telling
from sce.cli.lists import titles_for
from sce.data.storage import write_text
from sce.errors import InputError, needing
from sce.training.run import Run, warn_of

_RECORDS = (".json", ".jsonl", ".npy", ".safetensors")  # of runs and sweeps


def needs_report(module: str) -> Any:
    """Import a module of `sce.report`, or say how its libraries are installed."""
    with needing("report", "drawing charts"):
        return import_module(f"sce.report.{module}")


def write_page(path: Path, text: str) -> None:
    """Write a file whole or not at all; a pipe or a device is written as it is."""
    text = text.encode(errors="backslashreplace").decode()  # paths may be no Unicode
    try:
        if path.exists() and not path.resolve().is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_text(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def check_page(path: Path, *, record: bool = False) -> None:
    """Refuse early to write where a record of a run or sweep would be lost, or nothing can be.

    What is written as a `record` may have the ending of one, and must not be there yet.
    """
    try:
        above = path.resolve().parent
    except (OSError, RuntimeError) as error:  # a loop of links
        raise InputError(f"cannot write {path}: {error}") from error
    if not above.is_dir():
        raise InputError(f"cannot write {path}: there is no directory {above}; make it first")
    if path.is_dir():
        raise InputError(f"{path} is a directory; name a file, such as {path / 'report.html'}")
    if record and path.exists():
        raise InputError(f"{path} exists, and may be a record of a run; name a new file")
    if path.suffix in _RECORDS and not record:
        raise InputError(f"{path} has the ending of a record of a run; name a page, such as x.html")


def report(
    run: Annotated[Path, Parameter(name="RUN")],
    /,
    *,
    out: Path | None = None,
    data: Path | None = None,
    titles: Path | None = None,
    titles_columns: tuple[str, str] | None = None,
    device: str = "auto",
) -> None:
    """Write a run as one self-contained HTML page: figures, metrics, cost, samples, settings.

    Args:
        run: Directory that "sce train" wrote or is writing.
        out: File to write; one that is there is replaced. [default: report.html in RUN]
        data: The run's dataset, if it was moved; without it the page has no samples.
        titles: File of item ids and titles, instead of those that "sce prepare" was given.
        titles_columns: Its columns of ids and titles, if they have no usual names.
        device: Where the sample recommendations are computed: auto, cpu, cuda or cuda:N.
    """
    opened = Run.open(run)
    target = out or opened.path / "report.html"
    check_page(target)
    make_page = needs_report("run_page").make_page
    named = titles_for(opened.item_ids, titles, titles_columns)
    page = make_page(opened, data=data, device=device, titles=named)
    write_page(out.resolve() if out else target, page)
    warn_of(opened)
    with telling():
        print(target)
