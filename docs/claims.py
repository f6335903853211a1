"""Numbers in the sentences of README.md and docs/*.md, each by the rows that it is of.

A claim is a sentence as it stands in the page, with {} or {:.2f} for each number, and a function
that computes the numbers. Line breaks do not matter; what is not computed must stand as it is.
"""

import math
import operator
import re
from collections.abc import Iterable
from statistics import correlation, mean, stdev

from calls import KERNELS, WORDS, Claims, call, ends
from first_version import PAPER
from running import LARGE_LOGS, MANY_GPUS, SERVING
from studies import (
    LOGS,
    language_rows,
    memory,
    mib,
    over_logs,
    paper_rule,
    percent,
    seed_spreads,
    study,
    study_ratios,
    times,
    trained,
    whole_batch,
)
from trainings import (
    ROWS,
    Row,
    against_ce,
    by_setting,
    default_pairs,
    field,
    ndcg,
    of_sasrec,
    read,
    rows_with,
)

from sce.planning import _WORKSPACE, ERROR

FOUR = ("beauty", "reddit", "yelp2019", "union7")
LARGE = ("yoochoose_buys", "globo", "beauty", "reddit", "yelp2019", "food", "beauty2", "union7")
OTHERS = ("ligr", "hstu", "gru4rec", "bert4rec")
NUMBER = rf"([-+]?\d(?:[\d,]*\d)?(?:\.\d+)?|{'|'.join(WORDS)})"


def _peak(rows: list[Row]) -> float:
    return mean(row["memory_mib"]["training"] for row in rows)


def _ratio(log: str, loss: str, negatives: str | None = None, to: str = "ce") -> float:
    """Of the mean test NDCG@10 to that of another loss."""
    return mean(ndcg(trained(log, loss, negatives))) / mean(ndcg(trained(log, to)))


def _cut(log: str) -> float:
    """CCE⁻ to SCE."""
    return _ratio(log, "cce-", "popularity", to="sce")


def _rece() -> list[str]:
    """The logs where RECE had about as many negatives as SCE."""
    return [
        log for log, losses in of_sasrec().items()
        if all(row["settings"]["loss.rounds"] > 1 for row in losses.get(("rece", None), []))
        and ("rece", None) in losses
    ]  # fmt: skip


def _at_once(rows: Iterable[Row]) -> tuple[float, float]:
    return ends(row["at_once"] for row in rows if row["at_once"])


def _sampled() -> list[float]:
    """Peaks of CE⁻ to those of SCE."""
    return [
        _peak(rows) / _peak(losses["sce", None])
        for losses in of_sasrec().values() for (loss, _), rows in losses.items() if loss == "ce-"
    ]  # fmt: skip


def _drawn() -> tuple[float, float]:
    """Fewest and most negatives a sequence, but for CCE⁻."""
    every = (row for losses in of_sasrec().values() for rows in losses.values() for row in rows)
    counts = (row["settings"].get("loss.n_negatives") for row in every
              if not row["settings"].get("loss.cut"))  # fmt: skip
    return ends(count for count in counts if count)


def _again() -> list[float]:
    """By how many percent a seed that ran again differs."""
    return [
        percent(row["test"]["ndcg@10"] / first["test"]["ndcg@10"])
        for row in read("experiments/results/again/seed-1.jsonl")
        for first in trained(row["dataset"]["name"], row["settings"]["loss.name"])
        if first["seed"] == row["seed"]
    ]


def _student(ratios: Iterable[float]) -> tuple[float, float]:
    """The 95 % interval of five or ten ratios, by Student's t."""
    logs = list(map(math.log, ratios))
    half = {5: 2.776, 10: 2.262}[len(logs)] * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean(logs) - half), math.exp(mean(logs) + half)


def _welch(one: list[float], other: list[float]) -> float:
    """How far the first mean is ahead, by Welch's t."""
    error = math.sqrt(stdev(one) ** 2 / len(one) + stdev(other) ** 2 / len(other))
    return (mean(one) - mean(other)) / error


def _welch_of(log: str, loss: str, negatives: str, to: str = "sce") -> list[float]:
    """The same of two losses, on test and by validation."""
    return [
        _welch(ndcg(trained(log, loss, negatives), on), ndcg(trained(log, to), on))
        for on in ("test", "validation")
    ]


def _ahead(*logs: str) -> list[float]:
    """By how many percent SCE is ahead on these logs, where seeds (Welch's t) and users say so."""
    found = {}
    for one in against_ce():
        pairs = (default_pairs(seeds)[one["log"]] for seeds in ([0, 1, 2], [3, 4, 5]))
        if _welch(one["sce"], one["ce"]) > 2.6 and all(pair["interval"][0] > 1 for pair in pairs):
            found[one["log"]] = percent(one["test"])
    if found.keys() != set(logs):
        raise LookupError(f"SCE is ahead on {list(found)}, not on {logs}")
    return [found[log] for log in logs]


def _pairs(loss: str, negatives: str | None = None) -> dict[str, Row]:
    """Losses against exact CE for popular and rare targets, by log."""
    return {
        row["dataset"]["name"]: row
        for row in read(f"{ROWS}/pairs")
        if (row["setting"]["loss.name"], row["setting"]["loss.negatives"]) == (loss, negatives)
        and row["against"]["loss.name"] == "ce" and row["popular"] is not None
        and row["setting"]["model.name"] == "sasrec"
    }  # fmt: skip


def _spread_on_rare(log: str, loss: str) -> float:
    """The standard deviation over seeds on rare targets, in percent."""
    seeds = [row["by_popularity"] for row in trained(log, loss) if "by_popularity" in row]
    found = [one["test"]["rare"]["ndcg@10"] for one in seeds]
    return 100 * stdev(found) / mean(found)


def _backbone(log: str, model: str, loss: str = "sce", on: str = "test") -> float:
    return mean(ndcg(by_setting()[log][model, loss, None, None], on))


def _gains(model: str) -> list[float]:
    """SCE to exact CE with the same backbone, on each log where all were trained."""
    logs = ("ml1m", "steam", "beauty", "reddit", "yelp2019")
    return [_backbone(log, model) / _backbone(log, model, "ce") for log in logs]


def _times_of(known: str | None) -> Row:
    """HSTU on MovieLens-1M that knows past times, or the next; BERT4Rec, which knows none."""
    rows = read("experiments/results/published/ml1m-loo.jsonl")
    (row,) = (row for row in rows if row["settings"].get("model.times") == known)
    return row


def _peers(device: str, loss: str, of: str, shared: str = "sequence", ours: str = "sce") -> float:
    """What sce takes, to the least that another library takes."""
    known = {"device": device, "loss": loss, "together": False}
    rows = rows_with("benchmarks/results/train_peers.jsonl", **known)
    taken = min(row[of] for row in rows if row["library"] == ours and row["shared"] == shared)
    return float(taken / min(row[of] for row in rows if not row["library"].startswith("sce")))


def _few_negatives() -> float:
    """CE⁻ with 64 negatives on globo to CE, of the trainings of version 0.1, the whole batch."""
    few, ce = ({"training.batch_size": 128, "loss.name": name, **more} for name, more in (
        ("ce-", {"loss.n_negatives": 64}), ("ce", {})))  # fmt: skip
    rows = [row for row in read("experiments/results/globo.jsonl") if row["status"] == "finished"]
    found = (mean(ndcg(row for row in rows if one.items() <= row["settings"].items()))
             for one in (few, ce))  # fmt: skip
    return next(found) / next(found)


def _ligr(data: str, library: str) -> float:
    """LiGR by a library after ten epochs on a CPU."""
    wanted = {"data": data, "library": library, "ligr": True}
    return float(rows_with("benchmarks/results/train_peers.jsonl", **wanted)[0]["ndcg@10"])


def _in_their_order(model: str, dim: int = 64) -> Row:
    """LiGR or SASRec with eSASRec's settings, on the file that its authors take."""
    rows, wanted = read("experiments/results/published/s3_beauty.jsonl"), (model, dim)
    return next(row for row in rows if wanted == tuple(
        row["settings"][f"model.{of}"] for of in ("name", "dim")))  # fmt: skip


def _dropped(dim: int) -> Row:
    """LiGR with dropout of items, until it was stopped."""
    return rows_with("experiments/results/stopped/item-dropout.jsonl", dim=dim)[0]


def _as_esasrec() -> list[Row]:
    """LiGR and SASRec of 64 dimensions with eSASRec's settings, until time was up."""
    return rows_with("experiments/results/stopped/ligr.jsonl", dim=64)


def _limited() -> list[int]:
    """How many trainings of LiGR and GRU4Rec ended at the limit of epochs, and of how many."""
    rows = [
        row for settings in by_setting().values() for (model, *_), some in settings.items()
        if model in ("ligr", "gru4rec") for row in some
    ]  # fmt: skip
    return [sum(row["stopped"] == "epochs" for row in rows), len(rows)]


def _scale(data: str, loss: str = "SCE") -> Row:
    return rows_with("benchmarks/results/scale.jsonl", data=data, loss=loss)[0]


def _placed(alpha: float) -> list[float]:
    """Percent of the states that were in a bucket, of each training."""
    return [
        100 * row["buckets"]["placed"]
        for log in ("ml1m", "globo") for beta in (1.0, 4.0, 16.0)
        for row in paper_rule(log, alpha=alpha, beta=beta, bucket_size_y=256)
    ]  # fmt: skip


def _studied(log: str, *names: str) -> list[float]:
    """Test ratios to exact CE on a log, of what was tried in the study of coverage."""
    return [study_ratios()[log][name][0] for name in names]


def _seed_means() -> list[list[float]]:
    """The default's mean ratio over all logs, of each seed: on test, and on validation."""
    return [
        [mean(seeds) for seeds in zip(*(
            [one / mean(ndcg(trained(log, "ce"), on)) for one in ndcg(trained(log, "sce"), on)]
            for log in LOGS), strict=True)]
        for on in ("test", "validation")
    ]  # fmt: skip


def _to_plain(loss: str, of: str) -> float:
    """A language model's perplexity or memory to those of cross-entropy that keeps all logits."""
    found = language_rows()
    return float(found[loss][500][of] / found["ce"][500][of])


def _to_ce(log: str, size: int) -> float:
    """SCE with so many items in a bucket, by the paper's rule, to exact CE."""
    return mean(ndcg(paper_rule(log, bucket_size_y=size))) / mean(ndcg(whole_batch(log, "ce")))


def _on_cpu(loss: str) -> tuple[float, float]:
    """Seconds and memory of a call at a million items, on two cores."""
    (row,) = rows_with("benchmarks/results/loss_cpu.jsonl", loss=loss, items=10**6)
    return row["seconds"], row["extra MiB"]


def _beauty_of_the_paper() -> float:
    """SCE by the paper's rule on Amazon Beauty, the published model."""
    known = {"data": "beauty", "loss": "sce", "model": "eight sinks"}
    rows = rows_with("benchmarks/results/parity.jsonl", **known)
    return mean(ndcg(row for row in rows if row["options"].endswith("--loss.no-mix")))


RESULTS: Claims = {
    "On {} logs differences of several percent are noise": lambda: [
        WORDS[sum(share >= 3 for share in seed_spreads().values())]],
    "Quality was measured on {:.0f} k to {:.0f} k real items": lambda: [
        items / 1000 for items in ends(one["items"] for one in against_ce())],
    "(https://github.com/antklen/sasrec-bert4rec-recsys23) 0.0327; here it has {:.4f}": lambda: [
        mean(ndcg(trained("beauty2", "ce")))],
    "{} pairs differed by {:.0f} % on average and {:.0f} % at most": lambda: [
        len(_again()), mean(_again()), max(_again())],
    "by validation, {} to {} runs at once on one GPU": lambda: _at_once(
        row for log in LOGS for loss in ("sce", "ce") for row in trained(log, loss)),
    "beyond seeds and users on beauty and reddit, by {:.1f} and {:.1f} %": lambda: _ahead(
        "beauty", "reddit"),
    "in which exact CE took up to {:.0f} % more of it": lambda: [percent(max(
        _peak(rows[:3]) / _peak(rows[3:]) for rows in (trained(log, "ce") for log in LOGS)))],
    "a mean of {:.4f}, and SCE has {:.4f} here. The ratio by validation is {:.3f}.": lambda: [
        mean(row["test"] for row in study("reddit", "exact", None, None)),
        mean(ndcg(trained("reddit", "sce"))),
        next(one["validation"] for one in against_ce() if one["log"] == "reddit")],
    "training took {:.1f} to {:.1f} times as long, and longer on {} logs of {}.": lambda: [
        *ends(times()), WORDS[sum(ratio > 1 for ratio in times())], WORDS[len(LOGS)]],
    "at SCE's memory: {:,} to {:,} negatives a sequence": _drawn,
    "CE⁻ then takes {:.0f} to {:.0f} % more memory than SCE": lambda: map(
        percent, ends(_sampled())),
    "on union7 the best is {:.0f} % behind": lambda: [percent(max(
        mean(ndcg(rows)) for (loss, _), rows in of_sasrec()["union7"].items() if "ce-" in loss
    ) / mean(ndcg(trained("union7", "sce"))))],
    "On steam all but popular negatives are behind, by up to {:.0f} %": lambda: [percent(min(
        _ratio("steam", *one, to="sce") for one in of_sasrec()["steam"]))],
    "by validation, where Welch's t over seeds is {:.1f} and {:.1f}; on test, with {} users, it is "
    "{:.1f} and {:.1f}": lambda: [
        *(_welch_of("ml1m", loss, "uniform")[1] for loss in ("bce+", "gbce")),
        trained("ml1m", "bce+", "uniform")[0]["users"]["test"],
        *(_welch_of("ml1m", loss, "uniform")[0] for loss in ("bce+", "gbce"))],
    "ahead of SCE on globo by {:.0f} %, with three seeds: Welch's t is {:.1f} on test and {:.1f} "
    "by validation, against CE {:.1f} and {:.1f}": lambda: [
        percent(_ratio("globo", "ce-", "popularity", to="sce")),
        *_welch_of("globo", "ce-", "popularity"), *_welch_of("globo", "ce-", "popularity", "ce")],
    "Welch's t is {:.1f} and {:.1f} on test, {:.1f} and {:.1f} by validation.": lambda: [
        _welch(*(ndcg(trained(log, loss), on) for loss in ("sce", "ce")))
        for on in ("test", "validation") for log in ("yelp2019", "beauty2")],
    "where it is {:.1f} %, 1.03 is out of reach": lambda: [
        100 * stdev(_seed_means()[1]) / math.sqrt(6)],
    "without it the mean is {:.3f}": lambda: [
        mean(one["test"] for one in against_ce() if one["log"] != "food")],
    "by {:.0f} % on test; by validation by {:.0f} %, with {:.3f} to {:.3f}": lambda: [
        *(percent(mean(one[on] for one in against_ce())) for on in ("test", "validation")),
        *_student(one["validation"] for one in against_ce())],
    "on the seven of α = 2 with 2,048 items the default has {:.3f} / {:.3f}": lambda: over_logs(
        "default", [log for log in LOGS if "paper's rule, α = 2" in study_ratios()[log]])[:2],
    "with 64 uniform ones CE⁻ has {:.2f} times the NDCG@10 of CE": lambda: [_few_negatives()],
    "Seeds of SCE and CE differ by {:.0f} to {:.0f} % there": lambda: ends(
        100 * stdev(some) / mean(some) for some in (
            ndcg(trained("globo", loss)) for loss in ("sce", "ce"))),
    "It is {:.0f} to {:.0f} % behind SCE on beauty, reddit, yelp2019 and union7, and {:.0f} % "
    "ahead on globo, in {:.0f} to {:.0f} % of SCE's memory": lambda: [
        *ends(percent(_cut(log)) for log in FOUR), percent(_cut("globo")),
        *ends(100 * _peak(trained(log, "cce-", "popularity")) / _peak(trained(log, "sce"))
              for log in (*FOUR, "globo"))],
    "RECE is behind SCE on each of the {} logs where it was run. On {} of them": lambda: [
        WORDS[sum(("rece", None) in losses for losses in of_sasrec().values())],
        WORDS[len(_rece())]],
    "there it is behind by {:.0f} to {:.0f} %, and takes {:.0f} to {:.0f} MiB where SCE takes "
    "{:.0f} to {:.0f}": lambda: [
        *ends(percent(_ratio(log, "rece", to="sce")) for log in _rece()),
        *(end for loss in ("rece", "sce") for end in ends(
            _peak(trained(log, loss)) for log in _rece()))],
    "CE⁻, in {:.0f} to {:.0f} % more memory, is behind it by {:.0f} to {:.0f} % on the four, CCE⁻ "
    "by {:.0f} to {:.0f} %, and on globo they are ahead by {:.0f} and {:.0f} %": lambda: [
        *ends(percent(_peak(trained(log, "ce-", "popularity")) / _peak(trained(log, "sce")))
              for log in (*FOUR, "globo")),
        *ends(percent(_ratio(log, "ce-", "popularity", to="sce")) for log in FOUR),
        *ends(percent(_cut(log)) for log in FOUR),
        percent(_ratio("globo", "ce-", "popularity", to="sce")), percent(_cut("globo"))],
    "publish 0.0525 there; ours has {:.4f}": lambda: ndcg(trained("beauty", "rece")),
    "is {:.0f} % behind what Petrov and Macdonald publish": lambda: [
        percent(_times_of(None)["test"]["ndcg@10"] / 0.1516)],
    "best epoch was the {}th of {}": lambda: [
        _times_of(None)[of] for of in ("best_epoch", "epochs")],
    "their best epochs on beauty2 and union7 are {} to {}, those of SCE {} to {}": lambda: [
        end for losses in (("bce+", "gbce"), ("sce",)) for end in ends(
            row["best_epoch"] for log in ("beauty2", "union7")
            for (loss, _), rows in of_sasrec()[log].items() if loss in losses for row in rows)],
    "the mean ratio is {:.3f} on test and {:.3f} by validation with seeds 0 to 2, {:.3f} and "
    "{:.3f} with seeds 3 to 5": lambda: [
        mean(row[on] for row in default_pairs(seeds).values())
        for seeds in ([0, 1, 2], [3, 4, 5]) for on in ("test", "validation")],
    "as little as SCE: {} and {} MiB": lambda: [
        _scale("union7", loss)["peak MiB"] for loss in ("CE, cut-cross-entropy", "SCE")],
    "on union7 ([table](#a-million-items)), at {:.0f} times the time a step": lambda: [
        _scale("union7", "CE, cut-cross-entropy")["ms"] / _scale("union7")["ms"]],
    "by themselves gives {:.3f} to {:.3f}": lambda: _student(one["test"] for one in against_ce()),
    "has the best mean rank, {}; SASRec with exact CE, trained on the same ten logs, has {}":
    lambda: [
        re.findall(rf"SASRec \| {loss} \|.*?([\d.]+) of", field())[0] for loss in ("SCE", "CE")],
    "the ten ratios by themselves give {:.3f} to {:.3f}": lambda: _student(
        row["test"] for row in default_pairs([3, 4, 5]).values()),
    "with a mean correlation of {:.2f} on test and {:.2f} by validation": lambda: [
        mean(correlation(*(ndcg(trained(log, loss), on) for loss in ("sce", "ce"))) for log in LOGS)
        for on in ("test", "validation")],
    "with seeds 0 to 2 of both they are ahead on globo by {:.0f} and {:.0f} %": lambda: [
        percent(mean(ndcg(trained("globo", loss, "popularity")))
                / mean(ndcg(trained("globo", "sce")[:3]))) for loss in ("ce-", "cce-")],
    "seed 1 has {:.2f} on yelp2019": lambda: [next(
        row["rare"] for row in read(f"{ROWS}/pairs/seed-1.jsonl")
        if row["dataset"]["name"] == "yelp2019" and row["setting"]["loss.name"] == "sce")],
    "by itself; its memory is {:.0f} % of RePlay's": lambda: [100 * operator.truediv(*(
        rows_with("benchmarks/results/train_peers.jsonl", device="cuda", loss="ce-", library=name)
        [0]["peak MiB"] for name in ("sce", "replay")))],
    "{} to {} runs shared the GPU": lambda: _at_once(
        row for settings in by_setting().values() for rows in settings.values() for row in rows),
    "above 1 on {} logs of {}, on reddit by {:.1f} %": lambda: [
        WORDS[sum(row["popular"] > 1 for row in _pairs("sce").values())],
        WORDS[len(_pairs("sce"))], percent(_pairs("sce")["reddit"]["popular"])],
    "On rare ones it is within 3 % of CE on {}.": lambda: [
        WORDS[sum(percent(row["rare"]) < 3 for row in _pairs("sce").values())]],
    "it has {:.2f} of CE's NDCG@10 on yelp2019, where seeds of CE differ by {:.0f} % and those of "
    "SCE by {:.0f} %, and {:.2f} on globo, where they differ by {:.0f} and {:.0f} %": lambda: [
        found for log in ("yelp2019", "globo") for found in (
            _pairs("sce")[log]["rare"], *(_spread_on_rare(log, loss) for loss in ("ce", "sce")))],
    "Popular negatives have {:.2f} of it on the rare targets of reddit, uniform ones {:.2f}":
        lambda: [_pairs("ce-", kind)["reddit"]["rare"] for kind in ("popularity", "uniform")],
    "HSTU is at most {:.1f} % behind it on ml1m, beauty and yelp2019": lambda: [max(
        percent(_backbone(log, "hstu") / _backbone(log, "sasrec"))
        for log in ("ml1m", "beauty", "yelp2019"))],
    "it is {:.0f} and {:.0f} % behind": lambda: [
        percent(_backbone(log, "hstu") / _backbone(log, "sasrec")) for log in ("steam", "reddit")],
    "exact CE is {:.2f} with LiGR, {:.2f} with HSTU, {:.2f} with GRU4Rec and {:.2f} with BERT4Rec":
        lambda: [mean(_gains(model)) for model in OTHERS],
    "Of the {} ratios {} are below 1, the lowest {:.2f}. Averaged over the four backbones it is "
    "{:.2f}, by Student's t over the logs {:.3f} to {:.3f}.": lambda: [
        *(of(ratio for model in OTHERS for ratio in _gains(model)) for of in (
            lambda some: len(list(some)), lambda some: sum(one < 1 for one in some), min, mean)),
        *_student(mean(ratios) for ratios in zip(*map(_gains, OTHERS), strict=True))],
    "at the limit of 300 epochs in {} of {} trainings": _limited,
    "The same {:,} users and {:,} items, leave-one-out": lambda: [
        next(one[of] for one in against_ce() if one["log"] == "beauty")
        for of in ("users", "items")],
    "by the paper's rule SCE has [{:.4f}](paper.md) here": lambda: [_beauty_of_the_paper()],
    "SASRec of 64 and 256 dimensions has {:.4f} and {:.4f} on test (published: 0.0531)": lambda: [
        _in_their_order("sasrec", dim)["test"]["ndcg@10"] for dim in (64, 256)],
    "as their README has it, it has {:.4f}, with 256, as their file has it, {:.4f} (published: "
    "0.0523). Its best epochs are the {}th of {} and the {}th of {}.": lambda: [
        *(_in_their_order("ligr", dim)["test"]["ndcg@10"] for dim in (64, 256)),
        *(_in_their_order("ligr", dim)[of] for dim in (64, 256) for of in (
            "best_epoch", "epochs"))],
    "LiGR of 64 dimensions has NDCG@10 {:.4f} and HR@10 {:.4f} (published: 0.0523 and 0.0928). It "
    "was stopped after {} epochs and still rose: by validation it has {:.4f}, where it has {:.4f} "
    "without. With 256 dimensions it has {:.4f} after {} epochs.": lambda: [
        *(_dropped(64)["test"][of] for of in ("ndcg@10", "hr@10")), _dropped(64)["epochs"],
        _dropped(64)["validation"]["ndcg@10"], _in_their_order("ligr")["validation"]["ndcg@10"],
        _dropped(256)["test"]["ndcg@10"], _dropped(256)["epochs"]],
    "LiGR of 64 dimensions have {:.4f} and {:.4f} in that order, {:.4f} and {:.4f} in ours, when "
    "time was up after {} to {} epochs": lambda: [
        *(_in_their_order(model)["validation"]["ndcg@10"] for model in ("sasrec", "ligr")),
        *(row["validation"]["ndcg@10"] for row in sorted(
            _as_esasrec(), key=lambda row: row["model"], reverse=True)),
        *ends(row["epochs"] for row in _as_esasrec())],
    "64 negatives, has {:.4f}, ours {:.4f}": lambda: [
        _ligr("beauty", library) for library in ("rectools", "sce")],
    "sorted by item ours has {:.4f} after the same ten": lambda: [
        _ligr("beauty, ties by item", "sce")],
    "10 and was stopped after {} epochs, its best the {}th": lambda: [
        _times_of("past")[of] for of in ("epochs", "best_epoch")],
    "had 20, and its best was the {}th. In the {}th epoch": lambda: [
        _times_of("next")["best_epoch"], _times_of("past")["best_epoch"]],
    "NDCG@10 was {:.3f} with `past` and {:.3f} with `next`": lambda: [
        _times_of(known)["history"]["validation.ndcg@10"][_times_of("past")["best_epoch"] - 1]
        for known in ("past", "next")],
    "Recommending is for all {:,} users": lambda: [
        read("benchmarks/results/train_peers.jsonl")[0]["users"]],
    "On two cores an epoch of exact CE takes sce {:.0f} % of the time of the fastest peer, and "
    "{:.0f} % of the memory of the most frugal one": lambda: [
        100 * _peers("cpu", "ce", of) for of in ("epoch s", "peak MiB")],
    "Without logits it takes {:.0f} and {:.0f} %": lambda: [
        100 * _peers("cpu", "ce", of, ours="sce-chunked") for of in ("epoch s", "peak MiB")],
    "With CE⁻ it takes {:.0f} % of the time of RePlay": lambda: [
        100 * _peers("cpu", "ce-", "epoch s", "batch")],
    "and {:.0f} % where they are a sequence's; in {:.0f} and {:.0f} % of the memory": lambda: [
        100 * _peers("cpu", "ce-", *of)
        for of in (("epoch s",), ("peak MiB", "batch"), ("peak MiB",))],
    "negatives RePlay took {:.0f} s; here its better run counts, {:.0f} s": lambda: [
        row["epoch s"] for shared in ("batch", "sequence") for row in rows_with(
            "benchmarks/results/train_peers.jsonl", library="replay", loss="ce-", device="cpu",
            shared=shared, together=False)],
    "On the H200 it takes {:.0f} % of the time, in {:.0f} % of the memory": lambda: [
        100 * _peers("cuda", "ce", "epoch s"), 100 * _peers("cuda", "ce", "peak MiB")],
    "Without them exact CE takes {:.0f} % of the time of the fastest peer, and {:.0f} % of the "
    "memory of the most frugal one": lambda: [
        100 * _peers("cuda", "ce", of, ours="sce-chunked") for of in ("epoch s", "peak MiB")],
    "occur in {:.1f} M events": lambda: [_scale("synthetic")["events"] / 1e6],
    "the rules of the log reaches {:.3f}, popularity {:.3f}": lambda: [
        _scale("synthetic")[of] for of in ("known rules", "popularity ndcg@10")],
    "Five epochs of {} steps": lambda: [_scale("synthetic")["steps"]],
    "union7: {:,} real items": lambda: [_scale("union7")["items"]],
    "Three epochs of {} steps": lambda: [_scale("union7")["steps"]],
    "After five it is {:.0f} % behind SCE, at {:.0f} times the time a step": lambda: [
        percent(_scale("synthetic", "CE, chunked")["ndcg@10"] / _scale("synthetic")["ndcg@10"]),
        _scale("synthetic", "CE, chunked")["ms"] / _scale("synthetic")["ms"]],
    "would take {:.1f} ms for the backbone, {:.1f} ms for the loss and {:.1f} ms for the optimizer":
        lambda: [row[f"{part} ms"] for row in rows_with(
            "benchmarks/results/train_step.jsonl", items=10**6, loop="sce train")
            for part in ("backbone", "loss", "optimizer")],
    "deviation of {:.3f} on test and {:.3f} by validation: that of the six seeds of the default. "
    "With three seeds it is {:.3f} and {:.3f}": lambda: [
        stdev(some) / math.sqrt(seeds) for seeds in (1, 3) for some in _seed_means()],
    "256 items are the lowest by validation, {:.1f} % below the six seeds of the default; on test "
    "it is {:.1f} %": lambda: [
        100 * (over_logs("default")[on] - over_logs("256 items")[on]) for on in (1, 0)],
    "By validation the means of these rise with the items: {:.3f}, {:.3f}, {:.3f}, {:.3f}, {:.3f}":
        lambda: [over_logs(name, LARGE)[1] for name in (
            "256 items", "512", "1,024", "default, seeds 0 to 2", "4,096")],
    "with 256 items it has {:.2f} there, with 2,048 items {:.2f}. Coverage with as many buckets "
    "has {:.2f}, and so has the paper's rule with twice the buckets, {:.2f}, at 16 times "
    "the logits":
        lambda: _studied(
            "reddit", "paper's rule, 256 items", "paper's rule, α = 2", "α = 2",
            "paper's rule, α = 4"),
    "√targets buckets they have {:.2f} on reddit and {:.2f} on steam (below)": lambda: [
        *_studied("reddit", "256 items"), *_studied("steam", "256 items")],
    "left over to their nearest bucket, it has {:.2f}, with one training": lambda: _studied(
        "reddit", "those left over to their nearest bucket"),
    "On beauty the paper's rule has {:.2f}, with 256 items {:.2f}, and the default {:.2f}":
        lambda: _studied(
            "beauty", "paper's rule, α = 2", "paper's rule, 256 items", "default"),
    "√targets buckets are {:.1f} % below the default by validation and {:.1f} % on test": lambda: [
        100 * (over_logs("default")[on] - over_logs("α = 1")[on]) for on in (1, 0)],
    "It was missed by half a percent: the mean of six seeds has a standard error of {:.1f} %":
        lambda: [100 * stdev(_seed_means()[0]) / math.sqrt(6)],
    "its HR@10, {:.4f} and {:.4f}, is {:.0f} and {:.0f} % behind": lambda: [
        *(_in_their_order("sasrec", dim)["test"]["hr@10"] for dim in (64, 256)),
        *(percent(_in_their_order("sasrec", dim)["test"]["hr@10"] / 0.0921) for dim in (64, 256))],
    "With SASRec it is {:.3f} on these logs": lambda: [mean(_gains("sasrec"))],
    "In the table 256 has {} seeds on ml1m and {} on globo": lambda: [
        WORDS[len(paper_rule(log, bucket_size_y=256))] for log in ("ml1m", "globo")],
    "(α = 2, β = 1: {} on ml1m and {} on globo)": lambda: [
        WORDS[len(paper_rule(log, bucket_size_y=256))] for log in ("ml1m", "globo")],
    "With 64 items SCE loses up to {:.0f} % to CE": lambda: [
        max(100 * (1 - _to_ce(log, 64)) for log in ("beauty", "food", "beauty2", "union7"))],
    "1,024 and 1,031 items differ by {:.3f}, which is chance": lambda: [abs(
        mean(ndcg(paper_rule("food", bucket_size_y=1024)))
        - mean(ndcg(paper_rule("food", bucket_size_y=1031))))],
    "With α = 1, {:.0f} to {:.0f} % of the states are in a bucket; with α = 2, {:.0f} to {:.0f} %; "
    "with α = 4, {:.0f} % and more.": lambda: [
        *ends(_placed(1.0)), *ends(_placed(2.0)), math.floor(min(_placed(4.0)))],
    "What libraries keep is {:.0f} MiB": lambda: [_WORKSPACE / 2**20],
    "On these {} sizes it was off by {:.1f} % on average, and by {:.1f} % at most": lambda: [
        ERROR["sizes"], 100 * ERROR["mean"], 100 * ERROR["largest"]],
    "The logits of CE take {:,.0f} of {:,.0f} MiB; at 100 k items {:,.0f} of {:,.0f}.": lambda: [
        memory("ce", items, 128)["components_mib"][of]
        for items in (20_000, 100_000) for of in ("loss", "peak")],
    "SCE takes {:.0f} MiB at both sizes. BCE takes {:.0f} and {:.0f}, BCE⁺ and gBCE {:.0f} and "
    "{:.0f}, CE⁻ {:.0f} and {:.0f}.": lambda: [
        memory("sce", 100_000, 128)["components_mib"]["loss"],
        *(memory(loss, items, 128)["components_mib"]["loss"]
          for loss in ("bce", "bce+", "ce-") for items in (20_000, 100_000))],
    "Activations are {:.0f} to {:.0f} MiB": lambda: ends(
        row["components_mib"]["activations"] for row in read("experiments/results/memory.jsonl")
        if row["settings"]["training.batch_size"] == 128),
    "the least at every size: {:.0f}, {:.0f}, {:.0f} and {:.0f} % less": lambda: [
        percent(mib("sce", items, row_wise=True) / min(
            mib(loss, items) for loss in ("bce", "bce+", "gbce", "ce-")))
        for items in (40_000, 174_000, 10**6, 10**7)],
    "the least up to 174 k items: {:.0f} to {:.0f} % less than BCE and {:.0f} to {:.0f} % less "
    "than BCE⁺.": lambda: [
        end for loss in ("bce", "bce+") for end in ends(
            percent(mib("sce", items) / mib(loss, items))
            for items in (3_000, 10_000, 40_000, 174_000))],
    "At 174 k items it takes {:.1f} % less than CE, and {:.1f} % less with row-wise": lambda: [
        percent(mib("sce", 174_000, row_wise=of) / mib("ce", 174_000)) for of in (False, True)],
}  # fmt: skip
CHOOSING: Claims = {
    "Quality was measured on catalogues of {:.0f} k to {:.0f} k items": lambda: [
        items / 1000 for items in ends(one["items"] for one in against_ce())],
    "training with SCE took {:.1f} to {:.1f} times its time on {} logs": lambda: [
        *ends(times()), WORDS[len(LOGS)]],
    "took {:.0f} to {:.0f} % of the peak of exact CE.": lambda: ends(
        100 * one["peaks"][0] / one["peaks"][1] for one in against_ce()),
    "chunks take {:.0f} ms and {:.0f} MiB at 10,000 items, SCE {:.1f} ms and {:.0f} MiB, "
    "and all logits at once {:.1f} ms and {:,.0f} MiB": lambda: [
        call(loss, 10**4, "float32", of, bucket_size_y=size)
        for loss, size in (("CE, chunked", 256), ("SCE, default", 2048), ("CE", 256))
        for of in ("ms", "extra MiB")],
    "for SCE {:.0f} MiB at ten million items": lambda: [
        call("SCE", 10**7, "float32", "forward MiB")],
    "In bfloat16 SCE takes {:.1f} ms at ten million items. At a hundred million it takes {:.1f} ms":
        lambda: [call("SCE", 10**7), call("SCE", 10**8)],
    "a hundred million items it takes {:.1f} ms and {:.0f} MiB": lambda: [
        call("SCE, sparse gradient", 10**8, of=of) for of in ("ms", "extra MiB")],
    "SCE at a million items takes {:.2f} s and {:.0f} MiB": lambda: _on_cpu("SCE"),
    "ordinary tensor operations takes {:.2f} s and {:,.0f} MiB": lambda: _on_cpu(
        "SCE, tensor code"),
    "On the GPU the latter takes {:.1f} ms and {:,.0f} MiB": lambda: [
        call("SCE, tensor code", 10**6, "float32", of) for of in ("ms", "extra MiB")],
    "CE⁻ took {:.0f} to {:.0f} % more memory than SCE": lambda: map(percent, ends(_sampled())),
    "on yelp2019 SCE has {:.2f} of the NDCG@10 of exact CE on rare targets, on globo {:.2f}, on "
    "the other {} logs {:.2f} and more": lambda: [
        *(_pairs("sce")[log]["rare"] for log in ("yelp2019", "globo")), WORDS[len(LOGS) - 2],
        min(row["rare"] for log, row in _pairs("sce").items() if log not in ("yelp2019", "globo"))],
    "ahead of exact CE beyond seeds and users on beauty, by {:.0f} %": lambda: _ahead(
        "beauty", "reddit")[:1],
}  # fmt: skip
HOW: Claims = {
    "On reddit the paper's rule reaches {:.2f} of the test NDCG@10 of exact CE with 256 items in a "
    "bucket, and {:.2f} with 2,048. Coverage with 2,048 items and as many buckets reaches {:.2f}":
        lambda: _studied(
            "reddit", "paper's rule, 256 items", "paper's rule, α = 2", "α = 2"),
}  # fmt: skip
BEYOND: Claims = {
    "(not in the rows), with a vocabulary of {:,}": lambda: [language_rows()["ce"][500]["words"]],
    "that keeps all logits, and takes {:.1f} % of its memory": lambda: [
        100 * _to_plain("chunked", "loss MiB")],
    "at {:.0f} % of the memory `corrected` is {:.0f} % behind, at {:.0f} % of it {:.0f} %":
    lambda: [
        100 * _to_plain(f"corrected:frequent={words}", of) - less
        for words in ("15000,bucket_size_y=8192", "8192,bucket_size_y=4096")
        for of, less in (("loss MiB", 0), ("perplexity", 100))],
}  # fmt: skip
LOSS: Claims = {
    "or ahead on four logs of six, and {:.0f} and {:.0f} % behind": lambda: [
        100 * (1 - _to_ce(log, 256)) for log in ("union7", "food")],
}  # fmt: skip
CLAIMS: dict[str, Claims] = {
    "results.md": RESULTS, "choosing.md": CHOOSING, "kernels.md": KERNELS, "paper.md": PAPER,
    "how.md": HOW, "beyond.md": BEYOND, "loss.md": LOSS, "many-gpus.md": MANY_GPUS,
    "serving.md": SERVING, "large-logs.md": LARGE_LOGS,
}  # fmt: skip


def pattern(sentence: str) -> str:
    """Of a claim in a page, with any numbers and line breaks."""
    words = re.split(r"\{.*?\}", sentence)
    return NUMBER.join(re.escape(part).replace(r"\ ", r"\s+") for part in words)


def put_right(page: str, text: str) -> str:
    """A page with the numbers of its claims as the rows have them now."""
    for sentence, compute in CLAIMS.get(page, {}).items():
        values, places = list(compute()), re.findall(r"\{.*?\}", sentence)
        shown = [place.format(value) for place, value in zip(places, values, strict=True)]
        if len(every := [*re.finditer(pattern(sentence), text)]) != 1:
            has = "has more than once" if every else "does not have"
            raise LookupError(f"{page} {has}: {sentence.format(*values)}")
        (found,) = every
        for place in range(len(shown), 0, -1):
            text = text[: found.start(place)] + shown[place - 1] + text[found.end(place) :]
    return text


def untraced(page: str, text: str) -> list[str]:
    """Numbers of a page with the unit of a measurement that no block and no claim has.

    But for paragraphs that say that no rows are kept.
    """
    for sentence in CLAIMS.get(page, {}):
        text = re.sub(pattern(sentence), "", text)
    for other in (r"<!-- rows: .*?<!-- end -->", r"```.*?```", r"`[^`\n]*`", r"\]\([^)]*\)"):
        text = re.sub(other, "", text, flags=re.DOTALL)
    told = [part for part in re.split(r"\n\n|\n- ", text) if "no rows kept" not in part]
    units = r"(?<!\d)0\.\d{2,}|\d[\d.,]* (?:%|[MG]iB|MB|[mµ]?s|times|minutes)(?!\w)"
    return [one for part in told for one in re.findall(units, part)]
