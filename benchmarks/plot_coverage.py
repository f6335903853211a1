"""Draw quality against the number of buckets on each log, as a ratio to exact cross-entropy.

python benchmarks/plot_coverage.py    # experiments/results/coverage -> docs/figures/coverage.svg
"""

from pathlib import Path

import altair as alt
import polars as pl

from sce.report.drawing import Figure

ROOT = Path(__file__).parent.parent
RULES = {
    "paper, 2.0": "paper's rule",
    "coverage, 2.0": "coverage, 2 √targets buckets",
    "coverage, 4.0": "4 √targets",
    "coverage, 8.0": "8 √targets, the default",
}


def main() -> None:
    rows = pl.read_ndjson(ROOT / "experiments" / "results" / "coverage" / "study.jsonl")
    usual = pl.col("bucket_size_y").fill_null(2048) == 2048, pl.col("nearest").is_null()
    metrics = pl.col("test", "validation").mean()
    usual_rows = rows.filter(*usual, pl.col("centres").is_null())
    means = usual_rows.group_by("log", "rule", "alpha").agg(metrics)
    exact = means.filter(rule="exact").select("log", pl.col("test", "validation").name.prefix("ce"))
    found = (
        means.join(exact, on="log")
        .with_columns(rule=pl.format("{}, {}", "rule", "alpha").replace_strict(RULES, default=None))
        .drop_nulls("rule")
        .select(
            "log",
            "rule",
            test=pl.col("test") / pl.col("cetest"),
            validation=pl.col("validation") / pl.col("cevalidation"),
        )
        .unpivot(["test", "validation"], index=["log", "rule"], variable_name="of")
        .sort("log", "rule")
    )
    base = alt.Chart(found)
    marks = base.mark_point(filled=True, size=60, opacity=0.9).encode(
        x=alt.X("value:Q", title="NDCG@10, of exact cross-entropy's")
        .scale(zero=False)
        .axis(tickCount=5),
        y=alt.Y("log:N", title=None),
        color=alt.Color("rule:N", title=None, sort=list(RULES.values())).legend(orient="bottom"),
        shape=alt.Shape("rule:N", sort=list(RULES.values()), legend=None),
    )
    level = base.mark_rule(strokeDash=[4, 4]).encode(x=alt.datum(1.0))
    panels = [
        (marks + level).transform_filter(alt.datum.of == of).properties(title=of, width=280)
        for of in ("validation", "test")
    ]
    figure = Figure("Quality against the number of buckets", "", "", alt.hconcat(*panels))
    path = ROOT / "docs" / "figures" / "coverage.svg"
    path.write_text(figure.file, encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
