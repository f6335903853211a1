"""Tables and claims of the pages on serving, several GPUs and large logs."""

from statistics import mean, stdev

from calls import Claims
from trainings import Row, read, table


def rounded(value: float) -> str:
    """With as many digits as count."""
    return f"{value:,.{2 if value < 0.995 else 1 if value < 9.95 else 0}f}"


def serving() -> str:
    """Requests a second, and how long half, 90 % and 99 % of them waited at most, in ms."""
    servers = {"sce serve": "`sce serve`, exact", "sce serve --index": "with the index",
               "FastAPI + torch, one at a time": "FastAPI + torch"}  # fmt: skip
    found: dict[tuple[int, int], dict[str, str]] = {}
    for row in read("benchmarks/results/serve.jsonl"):
        if row["server"] in servers and row["seconds"] < 60:
            waits = (rounded(row[percentile]) for percentile in ("p50", "p90", "p99"))
            where = found.setdefault((row["items"], row["concurrency"]), {})
            where[row["server"]] = f"{row['requests/s']:,.0f}; {', '.join(waits)}"
    return table(["items", "clients", *servers.values()], (
        [f"{items:,}", f"{clients}", *(cells.get(server, "") for server in servers)]
        for (items, clients), cells in sorted(found.items())
    ))  # fmt: skip


def ranks() -> str:
    """The share of one rank."""
    head = ["items, ranks", "step", "choosing candidates", "the same, modelled", "norms and bounds",
            "MB sent", "by the formula", "peak memory", "sending by InfiniBand, modelled",
            "by NVLink, modelled"]  # fmt: skip
    return table(head, (
        [f"10{'⁸' if row['items'] == 10**8 else '⁹'}, {row['ranks']}",
         *(f"{row[f'{what} ms']:.0f} ms"
           for what in ("step", "selection", "modelled selection", "norm and bounds")),
         f"{row['MB']:.1f}", f"{row['MB by the formulas']:.1f}",
         f"{row['peak MiB']:,} MiB", f"{row['ms by InfiniBand']:.1f} ms",
         f"{row['ms by NVLink']:.1f} ms"]
        for row in read("benchmarks/results/rank_share.jsonl")
    ))  # fmt: skip


def processes() -> str:
    """Training by several processes on one GPU, and by one that computes their slices in turn."""
    return table(["processes", "same bits", "tokens/s", "one process, in turn", "MB sent a step"], (
        [f"{row['processes']}", "yes" if row["same bits"] else "no", f"{row['tokens/s']:,}",
         f"{row['tokens/s in turn']:,}", f"{row['MB sent a step']:.1f}"]
        for row in read("benchmarks/results/rank_processes.jsonl")
    ))  # fmt: skip


def hundred_million() -> str:
    """Training, evaluation and recommending with a catalogue of 10⁸ items."""
    (row,) = read("benchmarks/results/hundred_million.jsonl")
    seconds = row["seconds"]
    return table(["", ""], [
        ["a step", f"{row['ms']:.1f} ms, {row['tokens/s']:,} tokens/s"],
        ["peak memory of training",
         f"{row['peak MiB']:,} MiB; `sce plan` said {row['planned MiB']:,}"],
        [f"evaluating {row['test users']:,} users, unsampled",
         f"{seconds['fit: evaluation']:.1f} s, {row['evaluation MiB']:,} MiB"],
        [f"recommending for {row['recommended']} users", f"{seconds['recommend']:.1f} s"],
        *([f"{shown} of {row['test users']:,} test users",
           f"{row[name]:.3f}, popularity {row[f'popularity {name}']:.3f}"]
          for name, shown in (("ndcg@10", "NDCG@10"), ("hr@10", "HR@10"))),
    ])  # fmt: skip


def preparing() -> str:
    """Memory and time of `sce prepare`, of the newest row of each size."""
    ways = {"parts": "in parts", "whole": "all in memory", "duckdb": "DuckDB, grouping alone"}
    of = {"peak memory, GB": ("peak_bytes", 1e9, 2), "seconds of processor": ("cpu_seconds", 1, 0),
          "seconds": ("seconds", 1, 0)}  # fmt: skip

    def cells(taken: dict[str, float], unit: float, digits: int) -> list[str]:
        return [f"{taken[way] / unit:.{digits}f}" if way in taken else "" for way in ways]

    return table(["rows, limit", "", *ways.values()], (
        [f"{size // 10**6} M, {row['memory']}", shown, *cells(row[name], unit, digits)]
        for size, row in _prepared().items() for shown, (name, unit, digits) in of.items()
    ))  # fmt: skip


def _prepared() -> dict[int, Row]:
    return {row["rows"]: row for row in read("benchmarks/results/prepare_memory.jsonl")}


def _trainings() -> list[Row]:
    return read("benchmarks/results/going_on.jsonl")


def _grown(way: str, on: str, epoch: int) -> list[float]:
    """NDCG@10 of each seed after an epoch on a log that has grown."""
    return [
        of[epoch]
        for row in _trainings() if row["way"] == way
        for of in [dict(zip(row["epochs"], row[on], strict=True))] if epoch in of
    ]  # fmt: skip


def going_on() -> str:
    """Training on after a log has grown, or anew."""
    ways = [(on, way) for on in ("validation", "test") for way in ("on", "anew")]
    head = (f"{on}, {'trained on' if way == 'on' else 'anew'}" for on, way in ways)
    return table(["epochs on the whole log", *head], (
        [f"{epoch}", *(f"{mean(some):.4f} ± {stdev(some):.4f}" if some else "" for some in (
            _grown(way, on, epoch) for on, way in ways))]
        for epoch in range(5)
    ))  # fmt: skip


def _hundred_million() -> Row:
    return read("benchmarks/results/hundred_million.jsonl")[0]


def _served(*of: str) -> list[Row]:
    return [row for row in read("benchmarks/results/serve.jsonl") if {*of} <= {*row}]


MADE = [serving, ranks, processes, hundred_million, preparing, going_on]
MANY_GPUS: Claims = {
    "users ({:.0f} M events), made and prepared in {:.0f} s": lambda: [
        _hundred_million()["events"] / 1e6,
        sum(_hundred_million()["seconds"][of] for of in ("log", "dataset"))],
    "An item occurs {:.0f} times here": lambda: [
        _hundred_million()["events"] / _hundred_million()["items that occur"]],
}  # fmt: skip
SERVING: Claims = {
    "recall@10 of the index is {:.1f} % with 10,000 items, {:.1f} % with 100,000 and {:.1f} % with "
    "1,000,000": lambda: [
        100 * row["recall@10"] for row in _served("recall@10") if row["concurrency"] == 1],
    "on the same two cores: {:,.0f} requests, {} errors; memory {:.0f} MiB after a minute and a "
    "half, {:.0f} at the end": lambda: [
        value for row in _served("soak") for value in (
            row["requests/s"] * row["seconds"], row["errors"], row["MiB"][3], row["MiB"][-1])],
}  # fmt: skip
LARGE_LOGS: Claims = {
    "200 M in parts take {:.1f} times the processor of 20 M in memory": lambda: [
        _prepared()[200 * 10**6]["cpu_seconds"]["parts"] / 10
        / _prepared()[20 * 10**6]["cpu_seconds"]["whole"]],
    "two epochs of training on ({:.4f}) stand against four anew ({:.4f})": lambda: [
        mean(_grown("on", "test", 2)), mean(_grown("anew", "test", 4))],
    "are as many events as {:.1f} on the whole": lambda: [
        4 * first / whole for first, whole in [_trainings()[0]["events"]]],
    "the items {:,} were carried over, {} of them without an event to train on, and {} were new. "
    "{} test users; the first part has earlier events of {}": lambda: [
        next(row for row in _trainings() if row["way"] == "on")[of]
        for of in ("carried", "unseen", "new", "test_users", "test_users_in_first")],
}  # fmt: skip
