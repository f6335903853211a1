from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sce.data.batches import DeviceSequences, training_batch
from sce.data.length_groups import LengthGroups
from sce.errors import InputError
from sce.losses import CrossEntropy, ScalableCrossEntropy
from sce.models.sasrec import SASRec, SASRecSettings
from sce.training.settings import TrainingSettings
from sce.training.step import StepSeeds, TrainingStep, seeds_of_epoch
from tests.cycle_data import lay_out, walk

CPU = torch.device("cpu")
SEQUENCES = DeviceSequences.place(lay_out([walk(s, 3 + s % 5) for s in range(20)], range(20)))
SEEDS = StepSeeds(1, 2)


def make_step(
    loss: Any,
    dropout: float = 0.0,
    model: nn.Module | None = None,
    sequences: DeviceSequences = SEQUENCES,
    **options: Any,
) -> TrainingStep:
    shape = SASRecSettings(dim=8, blocks=1, dropout=dropout, max_length=6)
    model = model or SASRec(12, shape).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = options.pop("captured", False)
    chosen = TrainingSettings(**{"batch_size": 20} | options)
    return TrainingStep(
        model, loss, optimizer, sequences, chosen, device=CPU, max_length=6, captured=captured
    )


def test_a_step_is_what_one_would_write_by_hand() -> None:
    step = make_step(CrossEntropy())
    other = SASRec(12, SASRecSettings(dim=8, blocks=1, dropout=0.0, max_length=6))
    rows = torch.tensor([3, 1, 4])
    histories, targets = training_batch(SEQUENCES, rows, max_length=6)
    loss = CrossEntropy()(other(histories), other.catalogue, targets)
    loss.backward()
    result = step(rows, SEEDS)
    torch.testing.assert_close(result.loss, loss.detach())
    assert result.statistics is None
    for mine, theirs in zip(step.model.parameters(), other.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(mine.data, theirs.data - 0.1 * theirs.grad)


@pytest.mark.parametrize(
    ("machine", "precision", "used"),
    [("aarch64", "float32", False), ("aarch64", "bf16", True), ("x86_64", "float32", True)],
)
def test_a_step_in_float32_on_arm_multiplies_without_onednn(
    machine: str, precision: str, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    onednn: Any = torch.backends.mkldnn
    seen = []

    def loss(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
        states.register_hook(lambda _: seen.append(onednn.enabled))
        seen.append(onednn.enabled)
        return CrossEntropy().forward(states, catalogue, targets)

    monkeypatch.setattr("platform.machine", lambda: machine)
    # torch switches it off for good where bf16 fails.
    monkeypatch.setattr(onednn, "enabled", True)
    make_step(loss, precision=precision)(torch.arange(5), SEEDS)
    assert seen == [used, used]
    with pytest.raises(InputError):
        make_step(lambda *_: None, precision=precision)(torch.arange(5), SEEDS)
    assert onednn.enabled


def test_gradients_are_clipped() -> None:
    step = make_step(CrossEntropy(), clip_norm=1e-3)
    before = [p.detach().clone() for p in step.model.parameters()]
    step(torch.arange(5), SEEDS)
    moved = torch.cat(
        [(a - b).flatten() for a, b in zip(before, step.model.parameters(), strict=True)]
    )
    assert moved.norm().item() <= 0.1 * 1e-3 * 1.001


def test_the_seeds_alone_decide() -> None:
    def losses(*seeds: StepSeeds) -> list[float]:
        step = make_step(
            ScalableCrossEntropy(n_buckets=3, coverage=False, bucket_size_x=4, bucket_size_y=5),
            dropout=0.5,
        )
        return [step(torch.arange(5), seed).loss.item() for seed in seeds]

    one = losses(SEEDS, StepSeeds(3, 4))
    torch.manual_seed(99)
    assert losses(SEEDS, StepSeeds(3, 4)) == one
    assert losses(StepSeeds(5, 2))[0] != one[0]  # dropout
    assert losses(StepSeeds(1, 5))[0] != one[0]  # buckets


def test_a_batch_of_more_rows_than_there_are_has_the_targets_of_all() -> None:
    step = make_step(ScalableCrossEntropy(), batch_size=500)
    every = int((SEQUENCES.lengths - 1).clamp(max=6).sum())
    assert (step.mean_targets, step.max_targets) == (every, every)


def test_statistics_change_nothing_else() -> None:
    loss = ScalableCrossEntropy(n_buckets=3, coverage=False, bucket_size_x=4, bucket_size_y=5)
    plain = make_step(loss)(torch.arange(5), SEEDS)
    told = make_step(loss)(torch.arange(5), SEEDS, with_statistics=True)
    assert torch.equal(plain.loss, told.loss)
    assert told.statistics is not None
    assert told.statistics.shape == (4,)
    assert make_step(CrossEntropy())(torch.arange(5), SEEDS, with_statistics=True)[1] is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 1000), st.integers(1, 300))
def test_seeds_depend_on_seed_and_epoch_alone(seed: int, epoch: int, steps: int) -> None:
    order, of_steps = seeds_of_epoch(seed, epoch, steps)
    again, longer = seeds_of_epoch(seed, epoch, steps + 1)
    assert order == again
    assert of_steps == longer[:steps]
    assert len({number for pair in of_steps for number in pair}) == 2 * steps
    assert seeds_of_epoch(seed, epoch + 1, steps)[0] != order
    assert seeds_of_epoch(seed + 1, epoch, steps)[0] != order
    torch.Generator().manual_seed(max(order, *of_steps[0]))  # in the range that torch takes


class Recorded:
    """Stands for CUDA graphs: does the step, and notes the shape and the bound that it was for."""

    def __init__(self, step: Any, *_: object) -> None:
        self.step, self.kinds, self.asides = step, [], 0  # type: ignore[var-annotated]

    def __call__(self, inputs: tuple[Tensor, ...], stats: bool, bound: int | None) -> Any:
        self.kinds.append((tuple(inputs[0].shape), bound))
        return self.step(inputs, stats, bound)

    def on_capture_stream(self, work: Any) -> Any:
        self.asides += 1
        return work()


@pytest.mark.parametrize(("share", "coarse"), [(1 / 32, 1), (0.4, 8)])
def test_captured_steps_are_given_a_bound_of_their_targets(
    share: float, coarse: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sce.training.step.CapturedSteps", Recorded)
    monkeypatch.setattr("sce.training.step._BOUND", share)
    step, plain = make_step(CrossEntropy(), batch_size=5, captured=True), make_step(CrossEntropy())
    batches = [torch.randperm(20)[:5] for _ in range(30)]
    for rows in (*batches, torch.arange(3)):
        torch.testing.assert_close(step(rows, SEEDS).loss, plain(rows, SEEDS).loss)
    captured: Any = step._captured
    kinds = captured.kinds
    assert len(kinds) == 30  # the smaller batch was not recorded
    for rows, (shape, bound) in zip(batches, kinds, strict=True):
        count = int((SEQUENCES.lengths[rows] - 1).sum())
        assert count <= bound < count + coarse  # of at most 29
        assert bound % coarse == 0 or bound == 29
        assert shape[0] == 5
    other = make_step(
        ScalableCrossEntropy(n_buckets=2, coverage=False, bucket_size_x=4),
        batch_size=5,
        captured=True,
    )
    other(torch.arange(5), SEEDS)
    captured = other._captured
    assert captured.kinds[0][1] == 5 * 4  # of the mean batch, whatever this one has


# --- batches grouped by length


def test_the_longest_come_first_and_nothing_is_lost() -> None:
    step = make_step(CrossEntropy())
    histories, targets, groups, fixed, _ = step.batch(torch.arange(20))
    assert not fixed
    assert groups == ((12, 6), (4, 3), (4, 2))
    lengths = (histories >= 0).sum(1)
    assert lengths.tolist() == sorted((SEQUENCES.lengths - 1).clamp(max=6).tolist(), reverse=True)
    plain = training_batch(SEQUENCES, torch.arange(20), max_length=6)
    for found, expected in zip((histories, targets), plain, strict=True):
        assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))


def test_a_batch_that_does_not_fit_the_groups_of_all_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sce.training.step.CapturedSteps", Recorded)
    monkeypatch.setattr(
        "sce.data.length_groups._at_most", lambda rows, share: 1 if share < 0.7 else rows
    )
    step, plain = make_step(CrossEntropy(), batch_size=3, captured=True), make_step(CrossEntropy())
    assert step.batch(torch.arange(3)).length_groups == ((1, 6), (2, 3))
    long = torch.tensor([3, 4, 8])  # two of them have more than three events
    short = torch.tensor([0, 4, 5])
    assert not step.batch(long).fixed
    # Of a smaller batch the groups are those of all of its size, too.
    assert (
        step.batch(short[:2]).length_groups
        == step.batch(torch.tensor([6, 7])).length_groups
        == ((1, 6), (1, 3))
    )
    computed: list[int] = []
    first: Any = step.model.blocks[0]  # type: ignore[index]
    first.register_forward_pre_hook(lambda _, inputs: computed.append(len(inputs[0])))
    for rows in (long, short, long[:2]):
        torch.testing.assert_close(step(rows, SEEDS).loss, plain(rows, SEEDS).loss)
    assert computed == [3 * 6, 6 + 2 * 3, 2 * 6]
    for mine, theirs in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    captured: Any = step._captured
    assert [shape for shape, _ in captured.kinds] == [(3, 6)]  # the short ones alone
    assert captured.asides == 2


def test_only_batches_that_fit_run_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def pretend(model: nn.Module, **_: object) -> Any:
        def call(histories: Tensor, length_groups: LengthGroups) -> Any:
            called.append(length_groups)
            return model(histories, length_groups)

        return call

    monkeypatch.setattr(torch, "compile", pretend)
    monkeypatch.setattr(
        "sce.data.length_groups._at_most", lambda rows, share: 1 if share < 0.7 else rows
    )
    step = make_step(CrossEntropy(), batch_size=3, compile=True)
    for rows in ([3, 4, 8], [0, 4, 5], [5, 6]):
        step(torch.tensor(rows), SEEDS)
    assert called == [((1, 6), (2, 3))]


def test_the_groups_of_all_batches_have_no_room_for_what_cannot_be() -> None:
    # All of the sequences are one batch: there is no chance in it.
    assert make_step(CrossEntropy(), compile=True).batch(torch.arange(20)).length_groups == (
        make_step(CrossEntropy()).batch(torch.arange(20)).length_groups
    )
    # Those of a single event are in no batch: all others are as long as can be.
    lengths = 40 * [7] + 400 * [1]
    sequences = DeviceSequences.place(lay_out([walk(0, n) for n in lengths], range(440)))
    step = make_step(CrossEntropy(), sequences=sequences, compile=True)
    batch = step.batch(torch.arange(20))
    assert batch.fixed
    assert batch.length_groups == ((20, 6),)


def test_length_groups_are_given_by_name() -> None:
    class Other(SASRec):
        def forward(  # type: ignore[override]
            self, histories: Tensor, mask: Tensor | None = None, length_groups: Any = None
        ) -> Tensor:
            assert mask is None
            assert length_groups is not None
            return super().forward(histories, length_groups)

    model = Other(12, SASRecSettings(dim=8, blocks=1, max_length=6))
    make_step(CrossEntropy(), model=model)(torch.tensor([3, 0, 4]), SEEDS)


def test_a_model_of_ones_own_is_given_histories_alone() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.catalogue = nn.Parameter(torch.randn(12, 4))

        def forward(self, histories: Tensor) -> Tensor:
            self.seen = histories
            return self.catalogue[histories.clamp(min=0)]

    model = Plain()
    rows = torch.tensor([3, 0, 4])
    make_step(CrossEntropy(), model=model)(rows, SEEDS)
    assert torch.equal(model.seen, training_batch(SEQUENCES, rows, max_length=6).histories)
