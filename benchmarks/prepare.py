"""How fast and how large is `sce prepare`?

    python benchmarks/prepare.py scale     20 M interactions over 1 M items, csv.gz to prepared
    python benchmarks/prepare.py pandas    beside the straightforward pandas version, 5 M rows

Every measured program is a process of its own, from its start to its end, imports included; memory
is the largest resident set that the system saw in it. The log is synthetic, in the order of time
like a real one, and compressed with gzip. Its ids are strings, as in the logs that shops publish;
with --ids integer they are numbers, the one case for which pandas is fast, and the ratio is
reported without a minimum. Rows are appended to benchmarks/results/prepare.jsonl.
"""

import argparse
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from rows import commit, parser_of

if TYPE_CHECKING:
    import polars as pl

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "prepare.jsonl"
MEMORY_LIMIT = 6e9
SPEEDUP_WANTED = 5.0


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, rows in [("scale", 20_000_000), ("pandas", 5_000_000)]:
        command = commands.add_parser(name)
        command.add_argument("--rows", type=int, default=rows)
        command.add_argument("--items", type=int, default=1_000_000)
        command.add_argument("--ids", choices=["string", "integer"], default="string")
        command.add_argument("--repeats", type=int, default=1 if name == "scale" else 3)
        command.add_argument("--directory", type=Path, help="where the log and output may lie")
    # The programs that the two above measure, or that make what they read.
    for name in ("write-log", "with-pandas"):
        command = commands.add_parser(name)
        command.add_argument("paths", nargs=1 if name == "write-log" else 2, type=Path)
        command.add_argument("--rows", type=int)
        command.add_argument("--items", type=int)
        command.add_argument("--ids")
    options = parser.parse_args()
    if options.command == "write-log":
        write_log(options.paths[0], options.rows, options.items, options.ids)
    elif options.command == "with-pandas":
        prepare_with_pandas(*options.paths)
    else:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            measure(options, Path(directory))


def measure(options: argparse.Namespace, directory: Path) -> None:
    log = directory / "log.csv.gz"
    this = [sys.executable, str(Path(__file__).resolve())]
    # In a process of its own: a child is charged for the memory of the parent that started it.
    size = ["--rows", str(options.rows), "--items", str(options.items), "--ids", options.ids]
    run([*this, "write-log", str(log), *size])
    size_mb = log.stat().st_size / 1e6
    print(f"log: {options.rows:,} rows, {options.ids} ids, {size_mb:,.0f} MB", flush=True)
    sce = Path(sys.executable).with_name("sce")
    programs = {"sce": [str(sce), "prepare", str(log), "--preset", "paper", "--out"]}
    if options.command == "pandas":
        programs["pandas"] = [*this, "with-pandas", str(log)]
    start, busy = time.perf_counter(), busy_seconds()
    runs: dict[str, list[Run]] = {name: [] for name in programs}
    for repeat in range(options.repeats):
        for name, command in programs.items():  # in turns, so that a slow spell hits both
            out = directory / f"{name}-{repeat}"
            runs[name].append(run([*command, str(out)]))
            print(f"{name:<8}{runs[name][-1]}", flush=True)
    # What others did meanwhile: sce uses every core, pandas one, so a busy machine hides the gain.
    of_others = busy_seconds() - busy - sum(run.cpu_seconds for of in runs.values() for run in of)
    others = of_others / (time.perf_counter() - start)
    if options.command == "pandas":
        assert_same(directory / "sce-0", directory / "pandas-0")
        print("the same sequences and ids from both")
    counts = json.loads((directory / "sce-0" / "dataset.json").read_text())["counts"]
    keep_row(options, runs, log.stat().st_size, counts, others)


def keep_row(
    options: argparse.Namespace,
    runs: dict[str, list["Run"]],
    size: int,
    counts: dict[str, Any],
    others: float,
) -> None:
    seconds = {name: statistics.median(run.seconds for run in of) for name, of in runs.items()}
    row: dict[str, Any] = {
        "benchmark": options.command,
        "rows": options.rows,
        "items": options.items,
        "ids": options.ids,
        "csv_gz_bytes": size,
        "train": counts["train"],
        "test": counts["test"],
        "seconds": {name: [round(run.seconds, 2) for run in of] for name, of in runs.items()},
        "cpu_seconds": {
            name: [round(run.cpu_seconds, 2) for run in of] for name, of in runs.items()
        },
        "peak_bytes": {name: max(run.peak_bytes for run in of) for name, of in runs.items()},
        "cores_used_by_others": round(max(others, 0.0), 2),
        "timed": "whole process, start and imports included",
    }
    passed = row["peak_bytes"]["sce"] < MEMORY_LIMIT
    if "pandas" in seconds:
        row["speedup"] = round(seconds["pandas"] / seconds["sce"], 2)
        row["speedup_wanted"] = SPEEDUP_WANTED if options.ids == "string" else None
        passed &= row["speedup"] >= (row["speedup_wanted"] or 0)
        busy = f"others kept {row['cores_used_by_others']} cores busy"
        print(f"{row['speedup']} x faster than pandas (medians; {busy})")
    row |= {"passed": passed, **environment()}
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(f"kept in {RESULTS}: {'passed' if passed else 'FAILED'}")
    if not passed:
        sys.exit(1)


class Run(NamedTuple):
    """What one process took."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        sizes = f"{self.cpu_seconds:8.2f} s of processor {self.peak_bytes / 1e9:8.2f} GB"
        return f"{self.seconds:8.2f} s {sizes}"


def run(command: list[str]) -> Run:
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{errors}")
    # Linux counts in KiB, macOS in bytes.
    peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Run(seconds, usage.ru_utime + usage.ru_stime, peak_bytes)


def busy_seconds() -> float:
    """Processor time that the whole machine has spent on anything."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def write_log(path: Path, rows: int, items: int, ids: str) -> None:
    import polars as pl

    from sce.data.columns import ITEM, TIME, USER
    from sce.data.synthetic import SyntheticSettings, generate

    settings = SyntheticSettings(items=items, users=rows // 36, mean_events=40)
    frame = pl.concat(
        pl.DataFrame({USER: block.users, ITEM: block.items, TIME: block.timestamps})
        for block in generate(settings)
    )
    if len(frame) < rows:
        sys.exit(f"the generator gave {len(frame):,} rows; {rows:,} are wanted")
    frame = frame[:rows].sort(TIME, maintain_order=True)
    names = {USER: scattered(settings.users, ids, 13), ITEM: scattered(items, ids, 10)}
    with gzip.open(path, "wb", compresslevel=4) as file:
        for part in frame.iter_slices(1_000_000):
            part = part.with_columns(name.gather(part[of]).alias(of) for of, name in names.items())
            file.write(part.write_csv(include_header=file.tell() == 0).encode())


def scattered(count: int, kind: str, length: int) -> "pl.Series":
    """Distinct ids without order: 40 random bits each, as a number or in letters and digits."""
    import numpy as np
    import polars as pl

    numbers = np.unique(np.random.default_rng(length).integers(2**39, 2**40, 2 * count))
    numbers = np.random.default_rng(length).permutation(numbers)[:count]
    if kind == "integer":
        return pl.Series(numbers)
    return pl.Series([f"{number:X}".rjust(length, "B") for number in numbers.tolist()])


def prepare_with_pandas(source: Path, out: Path) -> None:
    """The same steps as one writes them in pandas without a second thought."""
    import numpy as np
    import pandas as pd

    log = pd.read_csv(source)
    item_users = log.groupby("item_id")["user_id"].nunique()
    log = log[log["item_id"].isin(item_users[item_users >= 5].index)]
    user_items = log.groupby("user_id")["item_id"].nunique()
    log = log[log["user_id"].isin(user_items[user_items >= 20].index)]
    log = log.sort_values(["user_id", "timestamp"], kind="stable")

    cut = log["timestamp"].quantile(0.95, interpolation="nearest")
    test_users = log.loc[log["timestamp"] >= cut, "user_id"].unique()
    is_test = log["user_id"].isin(test_users)
    train = log[~is_test]
    test = log[is_test & (log["timestamp"] >= cut)]
    test = test[test["item_id"].isin(train["item_id"].unique())]
    test = test[test.groupby("user_id")["item_id"].transform("size") >= 3]

    both = pd.concat([train, test])
    user_codes, user_ids = pd.factorize(both["user_id"], sort=True)
    item_codes, item_ids = pd.factorize(both["item_id"], sort=True)
    out.mkdir()
    np.save(out / "user_ids.npy", np.array(user_ids.to_list()))
    np.save(out / "item_ids.npy", np.array(item_ids.to_list()))
    for name, part in [("train", slice(0, len(train))), ("test", slice(len(train), None))]:
        users, lengths = np.unique(user_codes[part], return_counts=True)
        np.save(out / f"{name}_users.npy", users.astype(np.int32))
        np.save(out / f"{name}_offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
        np.save(out / f"{name}_items.npy", item_codes[part].astype(np.int32))


def assert_same(ours: Path, theirs: Path) -> None:
    import numpy as np

    from sce.data.prepared import PreparedDataset

    dataset = PreparedDataset.load(ours)
    for name in ("user_ids", "item_ids"):
        ids = getattr(dataset, name)
        assert ids.decode(range(len(ids))) == np.load(theirs / f"{name}.npy").tolist(), name
    for name in ("train", "test"):
        for part, array in vars(getattr(dataset, name)).items():
            expected = np.load(theirs / f"{name}_{part}.npy")
            np.testing.assert_array_equal(array, expected, err_msg=f"{name}_{part}", strict=True)


def environment() -> dict[str, Any]:
    names = ["numpy", "polars", "pandas", "scalable-cross-entropy"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "commit": commit(),
    }


if __name__ == "__main__":
    main()
