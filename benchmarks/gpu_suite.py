"""Everything that is measured on a GPU, in the order in which it matters, in the time there is.

    python benchmarks/gpu_suite.py --out gpu --list
    python benchmarks/gpu_suite.py --out gpu --budget 9m
    python benchmarks/gpu_suite.py --out gpu --budget 9m --data data --only parity sweeps

Each stage is a command of its own, printed before it runs; what it prints is in OUT/NAME.log, its
rows are in OUT. Nothing is lost when time runs out: the stage is interrupted, its rows were kept as
they came, and the same command goes on there. A stage that ended well is not repeated by the same
commit; one that failed is. What is worth keeping goes to benchmarks/results by hand.

DATA holds the prepared datasets beauty, ml1m and globo (see parity.py); without it, stages that
train on them are left out.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rows import commit, parser_of
from sce.units import parse_duration

HERE = Path(__file__).parent
DATASETS = ("beauty", "ml1m", "globo")
SWEEPS = ("main-table", "centres", "bucket-size", "mix", "alpha-beta", "pareto")
GRACE = 20.0  # seconds that an interrupted stage has for saving
STARTS_WITH = 15.0  # seconds below which no stage is begun
CUT_SHORT = 3  # the exit code when there is more to do


class Stage(NamedTuple):
    """One command of the suite."""

    name: str
    command: list[str]
    shares: bool = False  # runs many processes at once on the GPU


def stages(out: Path, data: Path | None, jobs: int, options: list[str]) -> list[Stage]:
    """List all stages, the most important first."""
    python = sys.executable

    def measure(script: str, *arguments: str) -> list[str]:
        return [python, str(HERE / f"{script}.py"), *arguments]

    def rows(name: str) -> list[str]:
        return ["--out", str(out / f"{name}.jsonl")]

    tests = ["losses", "training", "distributed/test_loss.py", "test_optim.py", "test_recommend.py"]
    found = [
        Stage("tests", [python, "-m", "pytest", "-n", str(jobs), "--durations", "10", *(
            str(HERE.parent / "tests" / name) for name in tests
        )]),
        Stage("train-step", measure("train_step", "--compile", "--profile", *rows("train_step"))),
        Stage("losses", measure("loss_gpu", "--missing", *rows("loss_gpu"))),
    ]  # fmt: skip
    if data is not None:
        both = ["--at-once", str(jobs)]
        found.append(Stage("parity", measure("parity", str(data), *both, *rows("parity")), True))
        several = ["--jobs", str(jobs), *options]
        for name, files, named in (
            ("sweeps", SWEEPS, DATASETS),
            ("beauty-table", ["beauty-table"], ["beauty"]),
        ):
            command = [*_sweep(files, out), *several, "--data", *(str(data / d) for d in named)]
            found.append(Stage(name, command, True))
    found.append(Stage("plan", measure("plan_grid", *rows("plan_grid"))))
    for name in ("rank_share", "rank_processes", "hundred_million"):
        found.append(Stage(name.replace("_", "-"), measure(name, *rows(name))))
    found.append(Stage("memory", _sweep(["catalogue-memory", "memory-components"], out)))
    return found


def _sweep(names: Sequence[str], out: Path) -> list[str]:
    """Sweep several files in one go, so that the GPU is full until the last run of all."""
    files = [str(HERE.parent / "experiments" / f"{name}.toml") for name in names]
    return [sys.executable, "-m", "sce", "sweep", *files, "--out", str(out / "sweeps")]


def main() -> int:
    options = _options()
    chosen = [
        stage
        for stage in stages(options.out, options.data, options.jobs, options.sweep)
        if options.only is None or stage.name in options.only
    ]
    if options.list:
        for stage in chosen:
            print(f"{stage.name:18} {shlex.join(stage.command)}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.budget if options.budget else None
    ended = {stage.name: run(stage, options.out, ends) for stage in chosen}
    print("\n" + "\n".join(f"{name:18} {how}" for name, how in ended.items()))
    if any(how.startswith("failed") for how in ended.values()):
        return 1
    return 0 if all(how.startswith("done") for how in ended.values()) else CUT_SHORT


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="rows, logs and sweeps")
    parser.add_argument("--data", type=Path, help="prepared beauty, ml1m and globo")
    parser.add_argument("--budget", type=parse_duration, help="such as 9m; default: until done")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these stages")
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="at once, where no time is measured")
    parser.add_argument("--sweep", type=shlex.split, default=[], help="more options of sce sweep")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    options = parser.parse_args()
    names = [stage.name for stage in stages(options.out, options.data, options.jobs, [])]
    for name in options.only or []:
        if name not in names:
            without = "" if options.data else " (those that train need --data)"
            parser.error(f"there is no stage {name}{without}: {', '.join(names)}")
    return options


def run(stage: Stage, out: Path, ends: float | None) -> str:
    """Run a stage, as long as there is time; say how it ended."""
    mark, this = out / f"{stage.name}.done", f"at commit {commit()}"
    if mark.exists() and mark.read_text().endswith(f"{this}\n"):
        return f"done before in {mark.read_text().strip()}"
    left = None if ends is None else ends - time.monotonic() - GRACE
    if left is not None and left < STARTS_WITH:
        return "not begun: no time left"
    print(f"{stage.name}: {shlex.join(stage.command)}", flush=True)
    begun = time.monotonic()
    with (out / f"{stage.name}.log").open("ab") as log, _gpu_for_many(stage.shares):
        process = subprocess.Popen(
            stage.command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        code = _wait(process, left)
    seconds = f"{time.monotonic() - begun:.0f} s"
    if code is None or code == CUT_SHORT:
        return f"interrupted after {seconds}"
    if code:
        return f"failed with code {code} after {seconds}: {out / stage.name}.log"
    mark.write_text(f"{seconds}, {this}\n")
    return f"done in {seconds}"


def _wait(process: subprocess.Popen[bytes], seconds: float | None) -> int | None:
    """Wait for a stage; interrupt it when its time is over, and then return nothing."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # whose own processes are its business
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    try:
        process.wait(GRACE - 5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


@contextmanager
def _gpu_for_many(wanted: bool) -> Iterator[None]:
    """Let processes share the GPU for real, through NVIDIA's MPS, where it is there."""
    control = shutil.which("nvidia-cuda-mps-control")
    if not wanted or control is None:
        yield
        return
    subprocess.run([control, "-d"], capture_output=True)
    try:
        yield
    finally:
        subprocess.run([control], input=b"quit\n", capture_output=True, timeout=30)


if __name__ == "__main__":
    sys.exit(main())
