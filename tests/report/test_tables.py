import csv
import io

import pytest

from sce.experiments.figure_spec import FigureSpec
from sce.experiments.store import Row
from sce.report.frame import comparable, group_seeds
from sce.report.tables import FIRST, SECOND, ComparisonTable, Line, make_table, to_csv
from tests.experiments.made_rows import CPU, GPU, NEVER, make_row, metrics


def read_csv(rows: list[Row]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(rows))))


def line(table: ComparisonTable, name: str) -> Line:
    (found,) = [one for one in table.lines if one.name == name]
    return found


@pytest.fixture
def table() -> ComparisonTable:
    rows = []
    # CE is the better one on test events; validation says CE⁻.
    for loss, test, memory, validation in [
        ("ce", 0.05, 3000, 0.06),
        ("sce", 0.06, 300, 0.05),
        ("ce-", 0.04, 900, 0.07),
    ]:
        for seed, change in enumerate((-0.001, 0.001)):
            rows.append(
                make_row(f"{loss}{seed}", {"loss.name": loss}, seed=seed, test=test + change,
                         memory=memory, validation=validation)
            )  # fmt: skip
    # Better on test events, and worse on validation: not chosen.
    rows += [
        make_row(f"x{seed}", {"loss.name": "ce", "model.dim": 9}, seed=seed, validation=0.01,
                 test=0.99)
        for seed in (0, 1)
    ]  # fmt: skip
    return make_table(group_seeds(rows), FigureSpec("table"))


def test_popular_and_rare_targets_have_lines_where_they_were_measured() -> None:
    rows = [
        make_row(f"{loss}{seed}", {"loss.name": loss}, seed=seed,
                 by_popularity={"test": {"popular": metrics(part), "rare": metrics(part / 2)}})
        for loss, part in [("ce", 0.1), ("sce", 0.2)] for seed in (0, 1)
    ]  # fmt: skip
    old = make_row("old", {"loss.name": "ce"}, data="old")
    table = make_table(group_seeds([*rows, old]), FigureSpec("table"))
    for kind, texts in [("popular", ["0.1000", "0.2000"]), ("rare", ["0.0500", "0.1000"])]:
        found = line(table, f"NDCG@10, {kind} targets")
        assert [cell.text for cell in found.cells] == texts
    lines = read_csv([*rows, old])
    name = "by_popularity.test.rare.ndcg@10"
    assert [one[name] for one in lines] == ["0.05", "0.1", ""]


def test_the_best_is_bold_the_second_underlined_and_sce_compared(table: ComparisonTable) -> None:
    assert table.heads[2:] == ["CE⁻", "CE", "SCE", "SCE against best other by validation"]
    ndcg = line(table, "NDCG@10")
    assert [cell.text for cell in ndcg.cells] == ["0.0400", "0.0500", "0.0600"]
    assert [cell.place for cell in ndcg.cells] == [0, SECOND, FIRST]
    assert [cell.spread for cell in ndcg.cells] == ["0.0014"] * 3
    assert ndcg.change == "+50% (CE⁻)"  # against the one rival that validation names
    memory = line(table, "peak training memory")
    assert [cell.place for cell in memory.cells] == [SECOND, 0, FIRST]
    assert memory.change == "−66.7% (CE⁻)"
    (duel,) = table.duels
    assert (duel.ours.dataset, duel.ours.loss, duel.theirs.loss) == ("ml1m", "sce", "ce-")


def test_where_rivals_differ_each_row_names_its_own() -> None:
    rows = [
        make_row(f"{data}{loss}", {"loss.name": loss}, data=data, validation=value)
        for data, losses in {"a": {"ce": 0.2, "bce": 0.1}, "b": {"ce": 0.1, "bce": 0.2}}.items()
        for loss, value in {**losses, "sce": 0.3}.items()
    ]
    table = make_table(group_seeds(rows), FigureSpec("table"))
    assert [one.change for one in table.lines if one.name == "NDCG@10"] == [
        "+0% (CE, one seed)", "+0% (BCE, one seed)",
    ]  # fmt: skip


def test_the_rows_are_those_of_the_paper(table: ComparisonTable) -> None:
    names = [one.name for one in table.lines]
    assert names == [
        "NDCG@1, HR@1", "NDCG@5", "NDCG@10", "HR@5", "HR@10",
        "COV@1", "COV@5", "COV@10", "peak training memory", "training time",
    ]  # fmt: skip


def test_what_was_chosen_is_said(table: ComparisonTable) -> None:
    assert table.chosen[1] == "ml1m: CE (2 seeds)"


def test_what_each_dataset_decided_is_said() -> None:
    rows = [
        make_row(
            data, {"loss.name": "sce", "loss.bucket_size_y": size, "model.dim": dim}, data=data
        )
        for data, size, dim in (("a", 85, 32), ("b", 282, 64))
    ]
    table = make_table(group_seeds(rows), FigureSpec("table"))
    assert table.chosen == [
        "a: SCE, bucket_size_y 85 (1 seed)",
        "b: SCE, bucket_size_y 282 (1 seed)",
    ]


def test_what_looks_equal_is_equal() -> None:
    rows = [make_row(loss, {"loss.name": loss}, test=value) for loss, value in
            [("ce", 0.050001), ("sce", 0.050002), ("bce", 0.01)]]  # fmt: skip
    cells = line(make_table(group_seeds(rows), FigureSpec("table")), "NDCG@10").cells
    assert [cell.place for cell in cells] == [SECOND, FIRST, FIRST]


def test_columns_from_elsewhere_are_for_their_dataset_and_not_ranked() -> None:
    rows = [
        make_row(f"{data}{loss}", {"loss.name": loss}, data=data, test=test)
        for data in ("beauty", "ml1m")
        for loss, test in (("ce", 0.04), ("sce", 0.05))
    ]
    view = FigureSpec("table", metrics=("ndcg@10", "hr@10"),
                published=({"name": "CBiT", "dataset": "beauty", "ndcg@10": 0.0537},))  # fmt: skip
    table = make_table(group_seeds(rows), view)
    assert table.heads[2:5] == ["CE", "SCE", "CBiT"]
    beauty, ml1m = (one for one in table.lines if one.name == "NDCG@10")
    assert [cell.place for cell in beauty.cells] == [SECOND, FIRST, 0]
    assert [cell.text for cell in beauty.cells] == ["0.0400", "0.0500", "0.0537"]
    assert [cell.text for cell in ml1m.cells] == ["0.0400", "0.0500", "–"]
    assert beauty.change == ml1m.change == "+25% (CE, one seed)"
    elsewhere = make_table(group_seeds(rows[2:]), view)
    assert elsewhere.heads[2:4] == ["CE", "SCE"]


def test_times_beside_others_are_not_ranked() -> None:
    rows = [make_row(loss, {"loss.name": loss}, seconds=seconds, at_once=4)
            for loss, seconds in (("ce", 9.0), ("sce", 3.0))]  # fmt: skip
    table = make_table(group_seeds(rows), FigureSpec("table"))
    time = line(table, "training time")
    assert [cell.place for cell in time.cells] == [0, 0]
    assert time.change == ""


def test_memory_of_a_whole_process_is_not_ranked() -> None:
    rows = [make_row(loss, {"loss.name": loss, "model.dim": int(memory)}, memory=memory,
                     seconds=memory, **CPU)
            for loss, memory in (("ce", 417.0), ("sce", 416.0))]  # fmt: skip
    table = make_table(group_seeds(rows), FigureSpec("table"))
    memory = line(table, "peak training memory")
    assert [(cell.text, cell.place) for cell in memory.cells] == [("417 MiB", 0), ("416 MiB", 0)]
    assert memory.change == ""
    assert [cell.place for cell in line(table, "training time").cells] == [SECOND, FIRST]


def test_company_of_a_run_that_is_left_out_does_not_count() -> None:
    rows = [
        make_row(f"{loss}{seed}", {"loss.name": loss}, seed=seed, seconds=seconds, at_once=at_once,
                 **where)
        for loss, seconds in (("ce", 9.0), ("sce", 3.0))
        for seed, (where, at_once) in enumerate([(CPU, 4), (GPU, 1)])
    ]  # fmt: skip
    table = make_table(group_seeds(comparable(rows)[0]), FigureSpec("table"))
    assert [cell.place for cell in line(table, "training time").cells] == [SECOND, FIRST]


def test_memory_and_time_have_spreads() -> None:
    rows = [make_row(f"{loss}{n}", {"loss.name": loss}, seed=n, memory=100.0 + 10 * n,
                     seconds=20.0 + n) for loss in ("ce", "sce") for n in (0, 1, 2)]  # fmt: skip
    table = make_table(group_seeds(rows), FigureSpec("table"))
    for name, spread in (("peak training memory", "10 MiB"), ("training time", "1.0 s")):
        assert [cell.spread for cell in line(table, name).cells] == [spread] * 2


def test_fewer_seeds_in_a_column_are_said() -> None:
    rows = [make_row(f"c{seed}", {"loss.name": "ce"}, seed=seed) for seed in range(3)]
    rows.append(make_row("s", {"loss.name": "sce"}))
    table = make_table(group_seeds(rows), FigureSpec("table"))
    assert table.caveats == ["Not all columns have as many seeds: 1 to 3."]


def test_what_was_best_in_its_last_epoch_is_not_compared() -> None:
    rows = [make_row(loss, {"loss.name": loss}, test=test, best_epoch=9, epochs=epochs)
            for loss, test, epochs in (("ce", 0.01, 9), ("sce", 0.036, 12))]  # fmt: skip
    table = make_table(group_seeds(rows), FigureSpec("table"))
    assert line(table, "NDCG@10").change == "not converged"
    assert line(table, "peak training memory").change == "+0% (CE)"
    assert table.caveats == [
        "Not converged, as the best epoch was the last, or the first with too few after it: "
        "ml1m CE; train longer."
    ]


def test_settings_that_validation_did_not_choose_are_named() -> None:
    """Both rates were tried with each loss, and two dimensions with none."""
    rows = [
        make_row(f"{loss}{rate}", {"loss.name": loss, "model.dim": dim, "training.device": loss,
                 "training.learning_rate": rate}, validation=rate if loss == "ce" else 1 - rate)
        for loss, dim in (("ce", 16), ("bce", 16), ("sce", 32)) for rate in (0.1, 0.2)
    ]  # fmt: skip
    table = make_table(group_seeds(rows), FigureSpec("table"))
    assert table.caveats == ["Columns on ml1m also differ in: dim 16 / 16 / 32."]
    assert [duel.differ for duel in table.duels] == ["dim 32 / 16"]
    assert {one.change for one in table.lines} == {"other settings"}
    alike = make_table(group_seeds(rows[:4]), FigureSpec("table"))
    assert (alike.caveats, alike.duels[0].differ) == ([], "")
    rates = FigureSpec("table", by=("training.learning_rate",))
    assert make_table(group_seeds(rows[:2]), rates).duels[0].differ == ""  # what is compared


def test_what_is_below_popularity_is_noted() -> None:
    rows = [make_row(loss, {"loss.name": loss}, test=test)
            for loss, test in (("bce", 0.005), ("gbce", 0.005), ("ce", 0.06))]  # fmt: skip
    table = make_table(group_seeds(rows), FigureSpec("table"))
    assert table.caveats == [
        f"Worse than popularity (0.0051) on test events: ml1m {name}." for name in ("BCE", "gBCE")
    ]


def test_each_row_is_judged_by_its_own_metric() -> None:
    popular = {"test": metrics(0.07) | {"cov@10": 0.001}}
    rows = [make_row(f"{loss}{seed}", {"loss.name": loss}, seed=seed, popularity=popular)
            for loss in ("ce", "sce") for seed in (0, 1)]  # fmt: skip
    table = make_table(group_seeds(rows), FigureSpec("table"))
    changes = {one.name: one.change for one in table.lines}
    assert changes["NDCG@10"] == changes["HR@10"] == "SCE and CE worse than popularity"
    assert changes["COV@10"] == changes["peak training memory"] == "+0% (CE)"


@pytest.mark.parametrize(
    ("derived", "exact"),
    [({"bucket_size_y": 3416}, True), ({"bucket_size_y": 2048}, False),
     ({"bucket_size_y": 3416, "bucket_size_x": 64}, False)],
)  # fmt: skip
def test_buckets_of_the_whole_catalogue_are_said(derived: dict[str, int], exact: bool) -> None:
    rows = [make_row("a", {"loss.name": "sce"}, derived=derived)]
    told = make_table(group_seeds(rows), FigureSpec("table")).caveats
    whole = "SCE was exact cross-entropy on ml1m: every bucket held the whole catalogue."
    assert told == ([whole] if exact else [])


def test_two_columns_of_a_setting_are_compared() -> None:
    rows = [make_row(centres, {"loss.name": "sce", "loss.centres": centres}, test=test)
            for centres, test in (("random", 0.05), ("mix", 0.04))]  # fmt: skip
    table = make_table(group_seeds(rows), FigureSpec("table", by=("loss.centres",)))
    assert table.heads[2:4] == ["centres mix", "centres random"]
    assert line(table, "NDCG@10").change == "+25% (centres mix, one seed)"


def test_a_column_is_not_named_by_what_does_not_apply_to_it() -> None:
    rows = [
        make_row("a", {"loss.name": "sce", "training.row_wise": False, "loss.alpha": None}),
        make_row("b", {"loss.name": "sce", "training.row_wise": True, "loss.alpha": 4}),
        make_row("c", {"loss.name": "ce"}),
    ]
    view = FigureSpec("table", by=("loss.name", "training.row_wise", "loss.alpha"))
    table = make_table(group_seeds(rows), view)
    assert table.heads[2:] == ["CE", "SCE, without row_wise", "SCE, with row_wise, alpha 4"]


def test_a_loss_that_a_dataset_lacks_leaves_a_gap() -> None:
    rows = [
        make_row("a", {"loss.name": "sce"}, data="a"),
        make_row("b", {"loss.name": "ce"}, data="a"),
        make_row("c", {"loss.name": "sce"}, data="b"),
    ]
    table = make_table(group_seeds(rows), FigureSpec("table"))
    texts = {(one.dataset, one.name): [cell.text for cell in one.cells] for one in table.lines}
    assert texts["b", "NDCG@10"] == ["–", "0.0600"]


def test_csv_has_a_line_for_every_setting() -> None:
    rows = [make_row(f"{seed}", {"loss.name": "sce", "loss.alpha": 2.0}, seed=seed,
                     test=0.05 + 0.01 * seed) for seed in (0, 1)]  # fmt: skip
    rows.append(make_row("ce", {"loss.name": "ce"}))
    found = read_csv(rows)
    assert [one["loss.name"] for one in found] == ["sce", "ce"]
    assert float(found[0]["test.ndcg@10"]) == pytest.approx(0.055)
    assert float(found[0]["test.ndcg@10.std"]) > 0
    assert (found[0]["seeds"], found[1]["loss.alpha"], found[1]["memory"]) == ("2", "", "500.0")
    assert {f"test.{name}" for name in metrics(1.0)} <= set(found[0])


def test_csv_has_sizes_that_followed_from_the_data() -> None:
    sizes = {"loss.n_buckets": None, "loss.bucket_size_y": 99}
    derived = {"n_buckets": 320, "bucket_size_y": 9, "targets_per_batch": 7.5}
    (found,) = read_csv([make_row("a", {"loss.name": "sce", **sizes}, derived=derived)])
    assert (found["loss.n_buckets"], found["loss.bucket_size_y"]) == ("320", "99")
    assert "loss.targets_per_batch" not in found


def test_csv_has_what_failed() -> None:
    rows = [make_row("a", {"loss.name": "sce"})]
    for seed in (0, 1, 2):
        lost = make_row(f"f{seed}", {"loss.name": "ce", "model.dim": 8}, seed=seed)
        bare = {name: lost[name] for name in list(lost)[:10]}
        rows.append(bare | {"status": "failed"} | NEVER)
    rows[-1]["failure"] = {"kind": "diverged", "message": "the loss is no number"}
    finished, failed, other = read_csv(rows)
    assert (other["failure"], other["seeds"]) == ("diverged", "1")
    assert (finished["status"], finished["failure"]) == ("finished", "")
    assert (failed["status"], failed["failure"], failed["seeds"]) == (
        "failed", "out of memory", "2",
    )  # fmt: skip
    assert (failed["loss.name"], failed["model.dim"], failed["memory"]) == ("ce", "8", "")


def test_csv_names_the_device() -> None:
    rows = [make_row(f"{seed}", {"loss.name": "ce"}, seed=seed, memory=memory, **where)
            for seed, (memory, where) in enumerate([(416.0, CPU), (50.0, GPU)])]  # fmt: skip
    (found,) = read_csv(rows)
    assert (found["seeds"], found["memory"]) == ("2", "50.0")
    assert (found["device"], found["memory_measured"]) == ("NVIDIA H200", "GPU memory allocated")
