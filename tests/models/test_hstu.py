"""HSTU against loops in float64; and what its times are for."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sce.cli import main
from sce.data.batches import PADDING, DeviceSequences
from sce.data.prepared import PreparedDataset, Sequences, write_prepared
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.evaluation.evaluate import evaluate
from sce.export import by_torch, export
from sce.losses import CrossEntropy, ScalableCrossEntropy
from sce.models.hstu import HSTU, HSTUSettings
from sce.models.sasrec import SASRec
from sce.recommend import Recommender, Request
from sce.serving.asking import OfUser
from sce.serving.catalogue import Catalogue, Source
from sce.serving.engine import Engine
from sce.serving.engine import Request as EngineRequest
from sce.training.fit import TrainingSettings, fit
from sce.training.run import Run
from sce.training.step import StepSeeds, TrainingStep
from tests.cycle_data import ITEMS, make_cycle, train
from tests.models.small import scaled_up

HISTORIES = torch.tensor([[3, 7, 5, 7], [2, 9, PADDING, PADDING], [8] + 3 * [PADDING]])
TIMES = torch.tensor([[0, 3, 90, 90, 10**9], [0, 7200, 7201, 5, 5], [0, 0, 1, 2, 3]]).int()
about_times = pytest.mark.parametrize("times", ["past", "next"])


def normal(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values) + 1e-6)
    return [(value - mean) / spread for value in values]


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def product(matrix: Tensor, values: list[float]) -> list[float]:
    return [sum(w * v for w, v in zip(row, values, strict=True)) for row in matrix.tolist()]


def plain_states(model: HSTU, history: list[int], times: list[int]) -> list[list[float]]:
    """One history, event by event, without a tensor."""
    settings, dim = model.settings, model.settings.dim
    width = dim // settings.heads
    states = [
        [
            math.sqrt(dim) * value + place
            for value, place in zip(item.tolist(), position.tolist(), strict=True)
        ]
        for item, position in zip(model.catalogue[history], model.positions, strict=False)
    ]
    for block in model.blocks:
        weights = dict(block.named_parameters())
        near, then = weights["by_distance"].tolist(), weights["by_time"].tolist()
        projected = [
            [silu(value) for value in product(weights["inner.weight"], normal(state))]
            for state in states
        ]
        following = []
        for i, state in enumerate(states):
            attended = [0.0] * dim
            for head in range(settings.heads):
                part = range(head * width, (head + 1) * width)
                for j in range(i + 1):
                    now = times[i + 1] if settings.times == "next" else times[i]
                    bucket = int(math.log(max(1, abs(now - times[j]))) / 0.301)
                    logit = sum(projected[i][2 * dim + n] * projected[j][3 * dim + n] for n in part)
                    weight = silu(logit + near[i - j] + then[bucket]) / settings.max_length
                    for n in part:
                        attended[n] += weight * projected[j][dim + n]
            pairs = zip(projected[i], normal(attended), strict=False)
            gated = product(weights["outer.weight"], [gate * value for gate, value in pairs])
            bias = weights["outer.bias"].tolist()
            following.append([a + b + c for a, b, c in zip(state, gated, bias, strict=True)])
        states = following
    scales = list(zip(*(weight.tolist() for weight in model.norm.parameters()), strict=True))
    return [
        [value * scale + bias for value, (scale, bias) in zip(normal(one), scales, strict=True)]
        for one in states
    ]


def make(**options: Any) -> HSTU:
    """A model in float64 of which every part matters."""
    return scaled_up(HSTU(12, dim=8, blocks=2, max_length=6, seed=1, **options)).double().eval()


@about_times
@pytest.mark.parametrize("heads", [1, 2])
def test_states_equal_those_of_loops(heads: int, times: Any) -> None:
    model, lengths = make(heads=heads, times=times), (HISTORIES != PADDING).sum(1)
    groups = ((1, 4), (2, 2))
    states = model(HISTORIES, times=TIMES)
    grouped = model(HISTORIES, groups, TIMES)
    embedded = model.catalogue[HISTORIES.clamp(min=0)]
    encoded = model.encode(embedded, lengths, TIMES)
    for row, length in enumerate(lengths.tolist()):
        history, known = HISTORIES[row, :length].tolist(), TIMES[row].tolist()
        expected = torch.tensor(plain_states(model, history, known), dtype=torch.float64)
        for found in (states[row, :length], grouped[row, :length]):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(encoded[row], expected[-1], rtol=1e-9, atol=1e-9)


@about_times
def test_a_later_time_changes_no_earlier_state_and_padding_has_none(times: Any) -> None:
    model, other = make(times=times), TIMES.clone()
    other[0, 3] += 5000
    before, after = model(HISTORIES, times=TIMES)[0], model(HISTORIES, times=other)[0]
    first = 3 - (times == "next")  # which knows the time of the event after it
    assert torch.equal(before[:first], after[:first])
    assert not torch.isclose(before[first:], after[first:]).all(dim=1).any()
    other = TIMES.clone()
    other[1, 3:] = other[2, 2:] = -(2**31)
    padded = torch.nn.functional.pad(TIMES, (0, 2), value=77)
    wide = torch.nn.functional.pad(HISTORIES, (0, 2), value=PADDING)
    real = HISTORIES != PADDING
    expected = model(HISTORIES, times=TIMES)[real]
    assert torch.equal(model(HISTORIES, times=other)[real], expected)
    torch.testing.assert_close(model(wide, times=padded)[:, :4][real], expected)
    assert not torch.allclose(model(HISTORIES)[0, 1:], before[1:])
    same = torch.full_like(TIMES, 17)
    assert torch.equal(model(HISTORIES, times=same), model(HISTORIES))


def test_a_second_more_is_another_bucket_at_the_very_border() -> None:
    model, last = HSTU(3, dim=4), int(math.log(2**31 - 1) / 0.301)
    borders = [math.ceil(math.exp(0.301 * bucket)) for bucket in range(3, last + 1)]
    apart = torch.tensor([[0, border, border - 1] for border in borders], dtype=torch.int32)
    found = model._buckets(apart.repeat(1, 2), 3)
    assert found[:, 1, 0].tolist() == [*range(3, last + 1)]
    assert found[:, 2, 0].tolist() == [*range(2, last)]
    assert int(model._buckets(torch.tensor([[0, 2**31 - 1, 0]]), 2).max()) == last == 71


def told_by_gaps(path: Path, length: int = 6, users: int = 224, test: int = 32) -> PreparedDataset:
    """Which of two items comes next tells only how long ago the event before the last was."""
    random = np.random.default_rng(0)
    is_long = random.integers(2, size=(users, length))
    short, long = (random.integers(*ends, (users, length)) for ends in ((9, 99), (10**5, 10**6)))
    times = np.cumsum(np.where(is_long, long, short), axis=1)
    items = 2 * np.arange(length) + np.roll(is_long, 1, axis=1)

    def lay_out(rows: range) -> Sequences:
        return Sequences(
            items[rows].ravel().astype(np.int32),
            length * np.arange(len(rows) + 1),
            np.array(rows, np.int32),
            (times - times[:, :1])[rows].ravel().astype(np.int32),
        )

    return write_prepared(
        path,
        train=lay_out(range(users - test)),
        test=lay_out(range(users - test, users)),
        user_ids=Vocabulary.from_integers(range(users)),
        item_ids=Vocabulary.from_integers(range(2 * length)),
        settings={"split": "leave-one-out"},
        counts={},
    )


def test_what_only_gaps_tell_is_learned(tmp_path: Path) -> None:
    dataset, found = told_by_gaps(tmp_path / "data"), {}
    given: dict[str, Any] = {"batch_size": 64, "learning_rate": 1e-2, "device": "cpu"}
    settings = TrainingSettings(epochs=20, evaluate_every=20, **given)
    for kind in (HSTU, SASRec):
        model: Any = kind(dataset.n_items, dim=16, blocks=1, dropout=0.0, max_length=6)
        fit(model, CrossEntropy(), dataset, settings=settings, progress=False)
        found[kind] = evaluate(model, dataset, split="test", ks=[1])["hr@1"]
        if kind is HSTU:
            recommender = Recommender(model, dataset.item_ids)
    assert found[HSTU] > 0.9
    assert found[SASRec] < 0.7
    # Users of the log are served with their times, and so are histories that come with them.
    codes = np.arange(200, 220)
    histories, times = dataset.histories(codes), dataset.histories(codes, "times")
    pairs = [
        (one[:-1].tolist(), at[:-1].tolist()) for one, at in zip(histories, times, strict=True)
    ]
    timed = recommender.recommend(
        [Request(one, times=[t + 10**9 for t in at]) for one, at in pairs]
    )
    hits = [one.items[0] == history[-1] for one, history in zip(timed, histories, strict=True)]
    assert sum(hits) > 18
    blind = recommender.recommend([one for one, _ in pairs])
    assert [one.items for one in blind] != [one.items for one in timed]
    of_users = [found for _, found in recommender.stream_users(dataset, codes.tolist())]
    whole = [
        Request(one.tolist(), times=at.tolist()) for one, at in zip(histories, times, strict=True)
    ]
    for mine, theirs in zip(of_users, recommender.recommend(whole), strict=True):
        assert mine.items == theirs.items


@pytest.fixture(scope="module")
def cycle(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return make_cycle(tmp_path_factory.mktemp("data") / "cycle")


def small(**options: Any) -> HSTU:
    return HSTU(ITEMS, dim=8, blocks=1, dropout=0.2, max_length=6, **options)


def by_time(model: HSTU) -> Tensor:
    return dict(model.named_parameters())["blocks.0.by_time"].detach()


def test_a_step_of_a_fixed_shape_has_times_too(
    cycle: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, ...]] = []

    def record(step: Any, *_: object) -> Any:
        def call(inputs: tuple[Tensor, ...], *options: Any) -> Any:
            seen.append(inputs)
            return step(inputs, *options)

        call.on_capture_stream = lambda work: work()  # type: ignore[attr-defined]
        return call

    monkeypatch.setattr("sce.training.step.CapturedSteps", record)
    sequences = DeviceSequences.place(cycle.train, times=True)
    rows, found = torch.arange(16), []
    for captured in (False, True):
        model = small(times="next").train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainingStep(
            model, CrossEntropy(), optimizer, sequences, TrainingSettings(batch_size=16),
            device=torch.device("cpu"), max_length=6, captured=captured,
        )  # fmt: skip
        model.eval()  # dropout falls elsewhere in another shape
        found.append(step(rows, StepSeeds(1, 2)).loss)
    torch.testing.assert_close(*found)
    ((histories, _, times),) = seen
    assert times.shape == (16, histories.shape[1] + 1)
    assert (times.diff(dim=1)[:, 0] == 60).all()


@pytest.mark.filterwarnings("ignore::sce.errors.TrainingWarning")
def test_shards_and_several_batches_a_step_have_times(cycle: PreparedDataset) -> None:
    loss, found = ScalableCrossEntropy(bucket_size_y=7), []
    ways: list[dict[str, Any]] = [{"shard_catalogue": True}, {"row_wise": True}]
    for changes in ways:
        model = small(times="next")
        result = train(cycle, loss, model=model, accumulate=2, batch_size=5, epochs=1, **changes)
        found.append((result.history[0]["loss"], by_time(model)))
    (loss_, times), (other, others) = found
    assert loss_ == pytest.approx(other, rel=1e-4)
    torch.testing.assert_close(times, others, rtol=1e-2, atol=1e-4)
    moved = times - by_time(small())
    # Gaps of a minute to five: 60, 120 ... 360 seconds.
    assert moved.nonzero().squeeze(1).tolist() == sorted(
        {int(math.log(60 * n) / 0.301) for n in range(1, 7)}
    )


def test_a_dataset_without_times_or_with_others_is_refused(
    cycle: PreparedDataset, tmp_path: Path
) -> None:
    def write(name: str, change: Callable[[Any], Any]) -> PreparedDataset:
        parts: Any = {
            part: replace(one, times=change(one.times))
            for part, one in {"train": cycle.train, "test": cycle.test}.items()
        }
        parts |= {"user_ids": cycle.user_ids, "item_ids": cycle.item_ids}
        return write_prepared(tmp_path / name, settings={}, counts={}, **parts)

    bare, other = write("bare", lambda times: None), write("other", lambda times: 2 * times).path
    assert bare.content_hash == cycle.content_hash
    with pytest.raises(InputError, match=r"no times of events .* \(hstu: times none\)"):
        train(bare, model=small(), out=tmp_path / "run", epochs=1)
    assert not (tmp_path / "run").exists()
    train(bare, model=small(times="none"), epochs=1)
    train(cycle, model=small(), out=tmp_path / "run", epochs=1)
    run, recommender = Run.open(tmp_path / "run"), Recommender.load(tmp_path / "run", "cpu")
    export(run, tmp_path / "export")
    with pytest.raises(
        InputError, match="was trained on: it has no times of events; give that one"
    ):
        train(bare, model=small(), out=tmp_path / "run", epochs=2, resume=True)
    for ask in (run.load_dataset, lambda of: [*recommender.stream_users(PreparedDataset.load(of))]):
        with pytest.raises(InputError, match="was trained on: it has other times of events"):
            ask(other)
    for served in (run.path, tmp_path / "export"):
        with pytest.raises(
            InputError, match="was trained on: it has other times of events; export"
        ):
            Source(served, data=other).load()
    train(cycle, model=SASRec(ITEMS, dim=8, max_length=6), out=tmp_path / "sasrec", epochs=1)
    train(bare, model=SASRec(ITEMS, dim=8, max_length=6), out=tmp_path / "sasrec", resume=True)


def test_impossible_settings_are_refused() -> None:
    wrong: Any
    for wrong in ({"times": "some"}, {"heads": 3}, {"dropout": 1.0}):
        with pytest.raises(InputError):
            HSTUSettings(**wrong)


@pytest.mark.filterwarnings("ignore::sce.data.prepare.PrepareWarning", "ignore::UserWarning")
def test_from_a_log_to_recommendations_by_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    times = random.integers(100, 10**5, (40, 8)).cumsum(1)
    lines = [
        f"u{user},{(user + place) % 30},{1_600_000_000 + times[user, place]}"
        for user in range(40)
        for place in range(8)
    ]
    (tmp_path / "log.csv").write_text("\n".join(["user_id,item_id,timestamp", *lines]))
    monkeypatch.chdir(tmp_path)
    commands = [
        "prepare log.csv --out data --split leave-one-out",
        "train data --out run --epochs 1 --batch-size 16 --device cpu --loss ce --model.name hstu "
        "--model.dim 8 --model.blocks 1 --model.max-length 6 --model.times next",
        "evaluate run",
        "plan --items 1000 --model hstu --memory 1GB",
        "recommend run --users u1 u2 --out users.jsonl",
        "recommend run --histories histories.jsonl --out timed.jsonl",
    ]
    asked: list[dict[str, Any]] = [{"history": [3, 4], "times": [0, at]} for at in (9, 10**6)]
    asked.append({"history": [3, 4]})
    (tmp_path / "histories.jsonl").write_text("\n".join(map(json.dumps, asked)))
    for command in commands:
        assert main(command.split()) == 0, capsys.readouterr().err
    near, far, without = map(json.loads, (tmp_path / "timed.jsonl").read_text().splitlines())
    scores = [of["scores"] for of in (near, far, without)]
    assert scores[0] != scores[1]
    # A server answers as the run does, for users of the log too.
    run, loaded = Run.open("run"), Recommender.load("run")
    model: Any = loaded.model
    given = by_torch(model.encode), model.catalogue.detach().numpy(), run.item_ids, 6, run.identity
    catalogue = replace(
        Catalogue.of(Engine(*given, uses_times=True)), users=PreparedDataset.load("data")
    )
    for line in (tmp_path / "users.jsonl").read_text().splitlines():
        wanted = json.loads(line)
        (found,) = catalogue.recommend([OfUser(user=wanted["user_id"])])
        assert [one["item"] for one in found["items"]] == wanted["items"]
    timed = [EngineRequest(**one) for one in asked]
    for mine, theirs in zip(catalogue.engine.recommend(timed), scores, strict=True):
        np.testing.assert_allclose(mine.scores, theirs, atol=1e-5)
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"user": [1, 1], "item": [4, 3], "time": [10**9 + 10**6, 10**9]})
    (of_frame,) = loaded.recommend(frame)
    np.testing.assert_allclose(of_frame.scores, scores[1], atol=1e-5)
    (tmp_path / "histories.jsonl").write_text('{"history": [3, 4], "times": [0]}')
    assert main([*commands[-1].split(), "--force"]) == 2
    assert "line 1: a history of 2 events has as many times; got 1" in capsys.readouterr().err
