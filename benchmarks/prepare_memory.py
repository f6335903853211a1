"""Does `sce prepare --memory` keep within it, and what does that cost?

    python benchmarks/prepare_memory.py --rows 20_000_000 --memory 1GB --whole
    python benchmarks/prepare_memory.py --rows 200_000_000 --memory 4GB

A synthetic log of Parquet files, 5 M rows each, in the order of time: users come and go, a million
items. Prepared in parts; with --whole also in memory, and both must give the same content hash.
Beside it DuckDB (of the interpreter --duckdb) groups the same log by user with the same memory,
each user's items in the order of time, and writes Parquet: what engines are used for. Every program
is a process of its own, imports included; memory is its largest resident set. Rows are appended to
benchmarks/results/prepare_memory.jsonl.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rows import keep, kept, parser_of, provenance

CHUNK, ITEMS, EVENTS = 5_000_000, 1_000_000, 50
GROUPING = """
import duckdb, sys
database = duckdb.connect(sys.argv[2] + ".db")
database.execute(f"SET memory_limit = '{sys.argv[3]}'")
database.execute("SET threads = 2")
database.execute("SET preserve_insertion_order = false")
database.execute(
    "COPY (SELECT user_id, list(item_id ORDER BY timestamp) AS items "
    f"FROM '{sys.argv[1]}/*.parquet' GROUP BY user_id) TO '{sys.argv[2]}' (FORMAT parquet)"
)
"""


def main() -> None:
    parser = parser_of(__doc__, rows=20_000_000, memory="1GB")
    parser.add_argument("--whole", action="store_true", help="in memory too")
    parser.add_argument("--duckdb", default=sys.executable, help="an interpreter that has it")
    parser.add_argument("--directory", type=Path, help="where the log and outputs may lie")
    parser.add_argument("--write", type=Path, help="only write the log there")
    options = parser.parse_args()
    if options.write is not None:
        write_log(options.write, options.rows)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        measure(options, Path(directory))


def measure(options: argparse.Namespace, directory: Path) -> None:
    log = directory / "log"
    where = {"date": time.strftime("%Y-%m-%d")}
    where |= provenance("numpy", "polars", "scalable-cross-entropy")
    # In a process of its own: a child is charged for the memory of the parent that started it.
    run([sys.executable, __file__, "--rows", str(options.rows), "--write", str(log)])
    sce = [sys.executable, "-m", "sce", "prepare", "--preset", "paper", "--out"]
    outs = {name: directory / name for name in ("parts", "whole", "duckdb")}
    parts = [str(outs["parts"]), "--partitions", str(log), "--memory", options.memory]
    grouping = [options.duckdb, "-c", GROUPING, str(log), str(outs["duckdb"]), options.memory]
    programs = {"parts": [*sce, *parts], "duckdb": grouping}
    if options.whole:
        programs["whole"] = [*sce, str(outs["whole"]), *map(str, sorted(log.iterdir()))]
    start, busy = time.perf_counter(), busy_seconds()
    runs: dict[str, Run] = {}
    for name, command in programs.items():
        try:
            runs[name] = run(command)
        except SystemExit as error:
            if name != "duckdb":
                raise
            print(f"{name:<8}{error}")
            continue
        print(f"{name:<8}{runs[name]}", flush=True)
    of_others = busy_seconds() - busy - sum(run.cpu_seconds for run in runs.values())
    manifests = {
        name: json.loads((outs[name] / "dataset.json").read_text())
        for name in ("parts", "whole")
        if name in runs
    }
    row: dict[str, Any] = {
        "rows": options.rows,
        "items": ITEMS,
        "memory": options.memory,
        "log_bytes": sum(file.stat().st_size for file in log.iterdir()),
        "train": manifests["parts"]["counts"]["train"],
        "test": manifests["parts"]["counts"]["test"],
        "seconds": {name: round(run.seconds, 1) for name, run in runs.items()},
        "cpu_seconds": {name: round(run.cpu_seconds, 1) for name, run in runs.items()},
        "peak_bytes": {name: run.peak_bytes for name, run in runs.items()},
        "rows_a_second": {name: round(options.rows / run.seconds) for name, run in runs.items()},
        "content": {name: manifest["checksum"] for name, manifest in manifests.items()},
        "cores_used_by_others": round(max(0.0, of_others / (time.perf_counter() - start)), 2),
        "timed": "whole process, start and imports included",
    }
    same = len(set(row["content"].values())) == 1
    print(f"the same content from both: {same}" if options.whole else "", json.dumps(row))
    keep("prepare_memory", [*kept("prepare_memory"), row | where])
    if not same:
        sys.exit("parts and the whole differ")


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


def write_log(directory: Path, rows: int) -> None:
    import numpy as np
    import polars as pl

    if shutil.disk_usage(directory.parent).free < 60 * rows:
        sys.exit(f"{directory} needs about {60 * rows / 1e9:.0f} GB of disk, log and outputs")
    directory.mkdir()
    count, users = max(1, rows // CHUNK), rows // EVENTS
    length = rows // count
    for chunk in range(count):
        random = np.random.Generator(np.random.PCG64([1, chunk]))
        moments = np.sort((chunk + random.random(length)) / count)  # of the whole, 0 to 1
        frame = pl.DataFrame(
            {
                # Each user is there for a tenth of the time, more at its beginning.
                "user_id": (users * (moments + 0.1 * random.random(length) ** 2) / 1.1).astype(int),
                "item_id": (ITEMS * random.random(length) ** 2.5).astype(int),
                "timestamp": (600_000_000 + 1e9 * moments).astype(int),
            }
        )
        name = f"part-{chunk:05}.parquet"
        frame.write_parquet(directory / name, compression="zstd", compression_level=1)


if __name__ == "__main__":
    main()
