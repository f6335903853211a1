import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sce.data.manifest import describe_file
from sce.errors import InputError
from sce.experiments.figure_spec import DEFAULT_FIGURES, FigureSpec
from sce.experiments.store import Row, Sweep
from sce.report.compare_page import make_files, make_markdown, make_page, make_summary
from sce.report.comparison import Comparison
from sce.training.run import read_ranks, write_ranks
from tests.experiments.made_rows import CPU, GPU, main_rows, make_row

WRITTEN = datetime(2026, 1, 2, 3, 4)


def comparison(rows: list[Row], *views: FigureSpec, measure: str = "training") -> Comparison:
    keys = tuple(row["key"] for row in rows)
    return Comparison(Sweep("main", "Mine & yours", keys, views, measure), rows)


@pytest.fixture
def whole() -> Comparison:
    return comparison(list(main_rows()), *DEFAULT_FIGURES)


def test_the_page_says_what_came_out(whole: Comparison) -> None:
    page = make_page([whole], written=WRITTEN)
    assert "<h1>Mine &amp; yours</h1>" in page
    assert "253 runs on 3 datasets; of these, 1 out of memory." in page
    assert "ml1m: test NDCG@10 of SCE (" in page
    assert "ml1m, CE, batch_size 4,096, seed 0 (ffffffffffff)" in page
    assert page.count('class="figure"') == 6
    assert "Popularity reaches test NDCG@10 0.0051 on ml1m, 0.0051 on beauty" in page
    assert "memory ran out (3 &lt;GiB&gt;)" in page
    assert "Measured on a GPU." in page
    assert "on 2026-01-02 at 03:04" in page
    assert len(page.encode()) < 500_000


def test_times_beside_others_are_marked(whole: Comparison) -> None:
    rows = [row | {"at_once": 14} for row in whole.rows]
    page = make_page([comparison(rows, *DEFAULT_FIGURES)], written=WRITTEN)
    assert "Runs shared the device" in page


def test_the_tile_says_what_the_table_does() -> None:
    """CE is better on test events, CE⁻ on validation events: the rival is CE⁻ everywhere."""
    rows = [
        make_row(loss, {"loss.name": loss}, validation=validation, test=test)
        for loss, validation, test in (("ce", 0.1, 0.08), ("ce-", 0.2, 0.05), ("sce", 0.1, 0.06))
    ]
    page = make_page([comparison(rows, FigureSpec("table"))], written=WRITTEN)
    assert "against CE⁻ (0.0500), the best other by validation" in page
    assert "<dd>one seed</dd>" in page
    assert "<td><em>+20% (CE⁻, one seed)</em></td>" in page


@pytest.mark.parametrize(("gap", "within"), [(0.0005, True), (0.03, False)])
def test_the_tile_says_how_far_seeds_spread(gap: float, within: bool) -> None:
    rows = [
        make_row(f"{loss}{seed}", {"loss.name": loss}, seed=seed, test=mean + 0.01 * (seed - 1))
        for loss, mean in (("ce", 0.06), ("sce", 0.06 + gap)) for seed in (0, 1, 2)
    ]  # fmt: skip
    page = make_page([comparison(rows, FigureSpec("table"))], written=WRITTEN)
    assert f"SCE ({0.06 + gap:.4f} ± 0.0100) against CE (0.0600 ± 0.0100)" in page
    assert ("the difference is within the spread of seeds" in page) is within
    assert "a single seed" not in page


def test_other_seeds_are_no_comparison() -> None:
    rows = [
        make_row(f"{loss}{seed}", {"loss.name": loss}, seed=seed, test=mean)
        for loss, mean, seeds in (("ce", 0.06, (0, 1)), ("sce", 0.09, (1, 2))) for seed in seeds
    ]  # fmt: skip
    page = make_page([comparison(rows, FigureSpec("table"))], written=WRITTEN)
    assert "; their seeds differ; " in page
    assert "<dd>other seeds</dd>" in page


def verdict(
    tmp_path: Path, ce: list[int], sce: list[int], *, seeds: int = 2, times: int = 100,
    rate: float = 0.05, **changes: Any,
) -> str:  # fmt: skip
    """The tile of runs of CE and SCE, given the ranks of their test users, each so many times."""
    rows = []
    for loss, ranks, step in (("ce", ce, rate), ("sce", sce, 0.05)):
        directory = tmp_path / loss
        directory.mkdir(exist_ok=True)
        written = write_ranks(directory, np.array(ranks * times, np.int32))
        gains = [1 / math.log2(rank + 1) if 0 < rank <= 10 else 0.0 for rank in ranks]
        settings = {"loss.name": loss, "training.learning_rate": step}
        rows += [
            make_row(f"{loss}{seed}", settings, test=sum(gains) / len(gains), seed=seed,
                     users={"test": len(ranks) * times}, test_ranks=written,
                     directory=str(directory), **changes) for seed in range(seeds)
        ]  # fmt: skip
    compared = comparison(rows, FigureSpec("table"))
    page, text = make_page([compared], written=WRITTEN), make_markdown([compared])
    found = re.search(r"<dl.*?<dt>(.*?)</dt><dd>(.*?)</dd>", page, re.DOTALL)
    assert found is not None
    assert f"- **{found[2]}**: {found[1]}\n" in text
    return f"{found[2]}: {found[1]}"


CLEAR = "+228%: ml1m: test NDCG@10 of SCE (0.6577 ± 0.0000) against CE (0.2003 ± 0.0000)"


def test_a_change_is_claimed_where_users_and_seeds_bear_it_out(tmp_path: Path) -> None:
    assert verdict(tmp_path, [0, 0, 9, 3], [0, 2, 1, 1]).startswith(CLEAR)
    single = verdict(tmp_path, [0, 0, 9, 3], [0, 2, 1, 1], seeds=1)
    assert single.startswith("one seed: ml1m: test NDCG@10 of SCE (0.6577) against CE (0.2003), ")
    assert "a single seed has no spread; over 400 test users +210% to +251% (95%)" in single
    assert verdict(tmp_path, [0, 0, 9, 3], [0, 0, 3, 9]).startswith("no clear difference: ")
    none = verdict(tmp_path, [0, 0, 0, 0], [0, 2, 1, 1])
    assert "over 400 test users no interval: 0 of them have a hit with the other, too few" in none


@pytest.mark.parametrize(
    ("changes", "word", "told"),
    [
        ({"best_epoch": 5, "epochs": 5}, "not converged",
         "; of 4 runs the best epoch was the last, or the first with too few after it"),
        ({"rate": 1e-9}, "other settings",
         ", the best other by validation; also differ in: learning_rate 0.05 / 1e-09; over "),
        ({"popularity": {"test": {"ndcg@10": 0.3}}}, "CE worse than popularity",
         "; CE is worse than popularity (0.3000); over "),
        ({"popularity": {"test": {"ndcg@10": 0.7}}}, "SCE and CE worse than popularity",
         "; SCE is worse than popularity (0.7000); CE is worse than popularity (0.7000); over "),
        ({"popularity": {"test": {"ndcg@10": 0.2}}}, "+228%", ""),
        ({"times": 6}, "too few users",
         "over 24 test users no interval: NDCG@10 differs for 18 of them, fewer than 20"),
        ({"times": 7}, "+228%", "(95%)"),
    ],
)  # fmt: skip
def test_a_change_that_has_another_cause_is_not_claimed(
    tmp_path: Path, changes: dict[str, Any], word: str, told: str
) -> None:
    found = verdict(tmp_path, [0, 0, 9, 3], [0, 2, 1, 1], **changes)
    assert found.startswith(f"{word}: ")
    assert told in found


def test_ranks_that_were_altered_are_refused(tmp_path: Path) -> None:
    written = write_ranks(tmp_path, np.array([1, 0], np.int32))
    assert read_ranks(tmp_path, written).tolist() == [1, 0]  # type: ignore[union-attr]
    with (tmp_path / "test_ranks.npy").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1")
    with pytest.raises(InputError, match="was altered"):
        read_ranks(tmp_path, written)
    for other in (np.array([1, None]), np.array([0.5, 1]), np.array([[1, 0]], np.int32)):
        np.save(tmp_path / "test_ranks.npy", other)
        with pytest.raises(InputError, match="was altered"):
            read_ranks(tmp_path, describe_file(tmp_path / "test_ranks.npy"))


def test_the_tile_does_not_compare_memory_of_whole_processes() -> None:
    def page(where: dict[str, Any]) -> str:
        rows = [make_row(loss, {"loss.name": loss}, **where) for loss in ("ce", "sce")]
        return make_page([comparison(rows, FigureSpec("table"))], written=WRITTEN)

    assert "over test users no interval: their ranks are not stored; memory +0%" in page(GPU)
    assert "; memory" not in page(CPU)


def test_what_was_measured_elsewhere_is_said_on_the_page_and_in_markdown() -> None:
    rows = [
        make_row(f"{loss}{seed}", {"loss.name": loss}, seed=seed, memory=memory, **where)
        for loss in ("ce", "sce")
        for seed, (memory, where) in enumerate([(416.0, CPU), (50.0, GPU)])
    ]
    mixed = comparison(rows, FigureSpec("table"))
    page, text = make_page([mixed], written=WRITTEN), make_markdown([mixed])
    assert page.count("those of 2 runs on cpu, 2 threads") == 2  # of the table, and of everything
    assert "those of 2 runs on cpu, 2 threads" in text
    for one in (page, text):
        assert "50 MiB" in one
        assert "233 MiB" not in one
        assert "416 MiB" not in one


def test_steps_make_no_table_of_quality() -> None:
    steps = make_row("a", {"loss.name": "ce"}, test=None, validation=None, measure="steps")
    page = make_page([comparison([steps], *DEFAULT_FIGURES, measure="steps")], written=WRITTEN)
    assert "NDCG@5" not in page
    assert "No run of this sweep has measured what its figures show." in page


def test_runs_that_are_missing_are_counted(whole: Comparison) -> None:
    short = Comparison(whole.sweep, whole.rows[2:])
    for text in (make_page([short, whole], written=WRITTEN), make_markdown([whole])):
        assert "been run yet" not in text
    for text in (make_page([short], written=WRITTEN), make_markdown([short])):
        assert "1 out of memory. 2 more of the sweep have not been run yet." in text
    assert "1 more of the sweep has not" in make_markdown([Comparison(whole.sweep, whole.rows[1:])])


def test_a_sweep_without_a_finished_run() -> None:
    failed = list(main_rows(1))[-1]
    page = make_page([comparison([failed], *DEFAULT_FIGURES)], written=WRITTEN)
    assert "No run of this sweep has finished yet." in page


def test_a_summary_without_a_table_or_a_finished_run(whole: Comparison) -> None:
    rows = [make_row(loss, {"loss.name": loss}) for loss in ("ce", "sce")]
    lead, (heads, *lines), told = make_summary([comparison(rows, FigureSpec("pareto", x="memory"))])
    assert lead == "2 runs on 1 dataset, all finished."
    assert heads[:3] == ["data", "setting", "seeds"]
    assert [line[1] for line in lines] == ["CE", "SCE"]
    assert list(told) == ["Popularity reaches test NDCG@10 0.0051 on ml1m."]
    _, (heads, *lines), told = make_summary([comparison([whole.rows[-1]], *DEFAULT_FIGURES)])
    assert (heads, lines, list(told)) == ([], [], [])


def test_of_several_sweeps_that_with_the_most_comparisons_is_told_and_named(
    whole: Comparison,
) -> None:
    rows = [make_row(loss, {"loss.name": loss}, test=0.02) for loss in ("bce", "gbce")]
    few = comparison(rows, FigureSpec("table"))
    few = replace(few, sweep=replace(few.sweep, name="few", title="Few"))
    lead, (_, *lines), told = make_summary([few, whole])
    assert lead.endswith("\nOf main (Mine & yours); --only tells of another: few.")
    assert len({line[0] for line in lines}) == 3  # datasets
    assert "ml1m: test NDCG@10 of SCE (" in told[0]
    for text in (make_page([few, whole], written=WRITTEN), make_markdown([few, whole])):
        assert "This is of main (Mine &amp; yours) alone." in text
    assert "alone." not in make_markdown([whole])


def test_bars_in_names_do_not_break_a_markdown_table() -> None:
    rows = [make_row(loss, {"loss.name": loss}, data="a|b<i>") for loss in ("x|y", "ce")]
    text = make_markdown([comparison(rows, FigureSpec("table"))])
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.split(r"(?<!\\)\|", line)) for line in table}) == 1
    assert r"| x\|y |" in table[0]
    assert r"| a\|b&lt;i&gt; | NDCG@10 |" in text


def test_markdown_of_trainings_and_of_steps(whole: Comparison) -> None:
    text = make_markdown([whole])
    assert text.startswith("## Mine &amp; yours\n\n253 runs on 3 datasets")
    assert "| ml1m | NDCG@1, HR@1 |" in text
    assert "Chosen: ml1m: BCE" in text
    assert "**: ml1m: test NDCG@10 of SCE" in text  # the headline of the page
    assert "- ml1m, CE, batch_size 4,096, seed 0 (ffffffffffff): out of memory" in text
    steps = [
        make_row("a", {"loss.name": "ce"}, test=None, validation=None, memory=2048.0,
                 measure="steps")
    ]  # fmt: skip
    table = make_markdown([comparison(steps, FigureSpec("components"), measure="steps")])
    assert "| data | setting | seeds | peak memory | training time |\n" in table
    assert "| ml1m | CE | 1 | 2 GiB | 30 s |" in table


def test_markdown_says_what_memory_it_is() -> None:
    def text(measure: str, where: list[dict[str, Any]]) -> str:
        rows = [make_row(f"{n}", {"loss.name": "ce"}, seed=n, measure=measure, memory=512.0 + 8 * n,
                         **one) for n, one in enumerate(where)]  # fmt: skip
        views = [FigureSpec("table")] if measure == "training" else [FigureSpec("components")]
        return make_markdown([comparison(rows, *views, measure=measure)])

    for measure in ("training", "steps"):
        assert "Memory is that of the whole process" in text(measure, [CPU])
        assert "Memory is that of the whole process" not in text(measure, [GPU])
        assert "those of 1 run on cpu, 2 threads" in text(measure, [CPU, GPU])
    assert " | 520 MiB | 30 s |" in text("steps", [CPU, GPU])
    assert " | 516 MiB ± 6 MiB |" in text("steps", [GPU, GPU])


def test_two_figures_of_one_title_are_two_files() -> None:
    rows = [make_row(f"{a}", {"loss.name": "sce", "loss.alpha": a}) for a in (1.0, 2.0)]
    view = FigureSpec("line", x="loss.alpha", title="Mine")
    found = make_files([comparison(rows, view, view)])
    assert sorted(found) == ["main-mine-2.svg", "main-mine.svg"]


def test_figures_as_files(whole: Comparison, tmp_path: Path) -> None:
    found = make_files([whole])
    assert len(found) == 6
    assert "main-globo-test-ndcg-10-against-training-time.svg" in found
    for text in found.values():
        ET.fromstring(text)
