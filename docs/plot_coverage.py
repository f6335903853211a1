"""Draw quality against the number of buckets on each log, and the share of states in any bucket.

python docs/plot_coverage.py    # experiments/results -> docs/figures/{sizes,placed}.svg
"""

from pathlib import Path
from statistics import mean, stdev

import altair as alt
import polars as pl
from studies import CENTRES, LOGS, paper_rule, study, trained
from trainings import ndcg

from sce.report.drawing import Figure

ROOT = Path(__file__).parent.parent


def _save(name: str, figure: Figure) -> None:
    path = ROOT / "docs" / "figures" / name
    path.write_text(figure.file, encoding="utf-8")
    print(path)


def draw_placed() -> None:
    """Share of the states in any bucket over training, by the paper's rule with 256 items."""
    shares = {
        (log, name): rows[0]["history"]["placed"]  # of the first seed
        for log in LOGS
        for centres, name in CENTRES.items()
        if (rows := paper_rule(log, centres, bucket_size_y=256))
    }
    curves = pl.DataFrame(
        [
            {"log": log, "centres": name, "epoch": epoch, "placed": share}
            for (log, name), history in shares.items()
            for epoch, share in enumerate(history, 1)
        ]
    )
    chart = (
        alt.Chart(curves)
        .mark_line()
        .encode(
            x=alt.X("epoch:Q", title="epoch")
            .scale(type="log", domain=[1, 300])
            .axis(values=[1, 10, 100], grid=False),
            y=alt.Y("placed:Q", title=None).axis(format="%", tickCount=4),
            color=alt.Color("centres:N", title=None, sort=[*CENTRES.values()]).legend(
                orient="bottom"
            ),
        )
        .properties(width=120, height=100)
        .facet(alt.Facet("log:N", title=None), columns=5)
    )
    _save("placed.svg", Figure("Share of the states in any bucket", "", "", chart))


def draw_sizes() -> None:
    """Ratios to exact cross-entropy against the number of buckets, and of items in each."""
    tried = {
        "items in a bucket": [(8.0, size) for size in (256, 512, 1024, 2048, 4096)],
        "buckets": [(alpha, 2048) for alpha in (1.0, 1.4, 2.0, 4.0, 8.0)],
    }
    points, bands = [], []
    for log in LOGS:
        exact, seeds = (ndcg(trained(log, loss), "validation") for loss in ("ce", "sce"))
        spread, ratio = stdev(exact) / mean(exact), mean(seeds) / mean(exact)
        bands += [{"log": log, "low": 1 - spread, "high": 1 + spread, "ratio": ratio, "times": 1}]
        for name, some in tried.items():
            for alpha, size in some:
                found = [row["validation"] for row in study(log, "coverage", alpha, size)
                         if row["seed"] < 3]  # fmt: skip
                if (alpha, size) == (8.0, 2048):
                    found = seeds[:3]
                if found:
                    times = alpha / 8 * size / 2048
                    ratio = mean(found) / mean(exact)
                    points.append({"log": log, "what": name, "times": times, "ratio": ratio})
    x = (
        alt.X("times:Q", title="times the default")
        .scale(type="log", base=2, domain=[1 / 8, 2])
        .axis(values=[1 / 8, 1 / 2, 2], format=".3~g", grid=False)
    )
    y = alt.Y("ratio:Q", title="of exact CE's").scale(zero=False).axis(tickCount=4)
    colour = alt.Color("what:N", title=None, sort=[*tried]).legend(orient="bottom")
    lines = alt.Chart(pl.DataFrame(points)).mark_line(point=True).encode(x=x, y=y, color=colour)
    base = alt.Chart(pl.DataFrame(bands))
    band = base.mark_rect(opacity=0.2).encode(y="low:Q", y2="high:Q")
    ring = base.mark_point(size=90).encode(x=x, y=y)
    panels = [
        alt.layer(
            *(part.transform_filter(alt.datum.log == log) for part in (band, lines, ring))
        ).properties(title=log, width=120, height=100)
        for log in LOGS
    ]
    chart = alt.vconcat(alt.hconcat(*panels[:5]), alt.hconcat(*panels[5:]))
    _save("sizes.svg", Figure("Quality against the number of buckets and items", "", "", chart))


if __name__ == "__main__":
    draw_sizes()
    draw_placed()
