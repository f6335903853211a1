"""BERT4Rec against torch's own encoder, one sequence at a time; its masks, and its training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sce.cli import main
from sce.data.batches import IGNORED, PADDING, DeviceSequences
from sce.distributed import Ranks
from sce.errors import InputError
from sce.losses import CrossEntropy
from sce.models.bert4rec import BERT4Rec, BERT4RecSettings
from sce.training.settings import TrainingSettings
from sce.training.slices import SlicedStep, seeds_of_slice
from sce.training.step import StepSeeds, TrainingStep
from tests.cycle_data import lay_out, make_cycle, train, walk
from tests.models.small import scaled_up

CPU, MASK = torch.device("cpu"), -2
HISTORIES = torch.tensor([[3, 7, 5, 7], [2, 9, PADDING, PADDING], [8] + 3 * [PADDING]])
TARGETS = torch.tensor([[7, 5, 7, 1], [9, 4, IGNORED, IGNORED], [0] + 3 * [IGNORED]])
MASKED = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]).bool()
SEQUENCES = DeviceSequences.place(lay_out([walk(s, 3 + s % 5) for s in range(20)], range(20)))
SEEDS = StepSeeds(1, 2)


def make(n_items: int = 12, **options: Any) -> BERT4Rec:
    """A model with weights that no layer's beginning has."""
    return scaled_up(BERT4Rec(n_items, **{"dim": 8, "max_length": 6, "dropout": 0.0} | options))


def plain_states(model: BERT4Rec, sequence: list[int]) -> Tensor:
    """The hidden states of one sequence, in which masked events are `MASK`."""
    settings = model.settings
    embedded = torch.stack([model.mask if i == MASK else model.catalogue[i] for i in sequence])
    states = model.embedding_norm(embedded + model.positions[-len(sequence) :])[None]
    for block in model.blocks:
        one: Any = block
        shape = settings.dim, settings.heads, settings.widening * settings.dim
        options: Any = {"activation": "gelu", "layer_norm_eps": 1e-12, "batch_first": True}
        layer = nn.TransformerEncoderLayer(*shape, **options).to(model.catalogue.dtype).eval()
        weights = {
            f"{theirs}.{part}": getattr(getattr(one, ours), part)
            for theirs, ours in {
                "self_attn.out_proj": "attention_out",
                "linear1": "inner",
                "linear2": "outer",
                "norm1": "attention_norm",
                "norm2": "forward_norm",
            }.items()
            for part in ("weight", "bias")
        }
        for part in ("weight", "bias"):
            joined = getattr(one.query, part), getattr(one.key_value, part)
            weights[f"self_attn.in_proj_{part}"] = torch.cat(joined)
        layer.load_state_dict(weights)
        states = layer(states)
    head: Any = model.norm
    return head[2](nn.functional.gelu(head[0](states[0])))  # type: ignore[no-any-return]


@pytest.mark.parametrize("heads", [1, 2])
def test_states_equal_those_of_plain_parts(heads: int) -> None:
    model = make(heads=heads).double().eval()
    options: Any = {"rtol": 1e-9, "atol": 1e-9}
    states = model(HISTORIES)
    sequences = model.inputs(HISTORIES, TARGETS).masked_fill(MASKED, MASK).tolist()
    trained = model(model.inputs(HISTORIES, TARGETS), ((1, 4), (2, 2)), MASKED)
    for row, history in enumerate(HISTORIES.tolist()):
        events = [item for item in history if item != PADDING]
        expected = plain_states(model, [*events, MASK])[-1]
        torch.testing.assert_close(states[row, len(events) - 1], expected, **options)
        expected = plain_states(model, sequences[row][: len(events) + 1])[1:]
        torch.testing.assert_close(trained[row, : len(events)], expected, **options)


def test_a_step_trains_on_what_is_masked_and_on_nothing_else() -> None:
    model = make(last_only=0.0, masked=0.4)
    settings = TrainingSettings(batch_size=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sizes: Any = {"device": CPU, "max_length": 6}
    step = TrainingStep(model, CrossEntropy(), optimizer, SEQUENCES, settings, **sizes)
    rows = torch.tensor([4, 1, 3])  # of 7, 4 and 6 events
    found = step(rows, SEEDS).loss
    torch.manual_seed(SEEDS.model)
    histories = torch.tensor([walk(4, 7), [*walk(3, 6), PADDING], [*walk(1, 4), *3 * [PADDING]]])
    targets, given = model.draw(histories[:, 1:].masked_fill(histories[:, 1:] < 0, IGNORED))
    chosen = targets != IGNORED
    assert chosen.sum(1).tolist() == [2, 2, 1]  # 0.4 of 6, 5 and 3
    assert torch.equal(given["masked"][:, 1:], chosen)
    assert not given["masked"][:, 0].any()
    logits = model(histories, None, given["masked"])[chosen] @ model.catalogue.T
    expected = nn.functional.cross_entropy(logits, targets[chosen])
    torch.testing.assert_close(found, expected.detach())


def test_no_state_sees_what_is_masked() -> None:
    model = make().eval()
    whole = model.inputs(HISTORIES, TARGETS)
    other = whole.masked_fill(MASKED, 11)
    assert not torch.equal(whole, other)
    assert torch.equal(model(whole, None, MASKED), model(other, None, MASKED))
    other[0, 2] = 11  # which is seen, also from before it
    before, after = (model(each, None, MASKED)[0, 0] for each in (whole, other))
    assert not torch.allclose(before, after)


def test_as_many_events_are_masked_as_are_said_and_each_as_often() -> None:
    targets = torch.arange(10).repeat(4000, 1)
    targets[::2, 7:] = IGNORED
    model = make(masked=0.3, last_only=0.25)
    torch.manual_seed(0)
    drawn, _ = model.draw(targets)
    chosen = drawn != IGNORED
    assert (drawn == targets)[chosen].all()
    counts, last = chosen.sum(1), torch.where(targets[:, 9] == IGNORED, 6, 9)
    assert {*counts[1::2].tolist()} == {1, 3}
    assert {*counts[::2].tolist()} == {1, 2}  # of 7
    alone = counts == 1
    assert chosen[alone, last[alone]].all()
    assert alone.float().mean() == pytest.approx(0.25, abs=0.03)
    shares = chosen[1::2][~alone[1::2]].float().mean(0)
    torch.testing.assert_close(shares, torch.full((10,), 0.3), atol=0.06, rtol=0)
    assert model.most_targets(torch.tensor([1, 2, 5, 10])).tolist() == [1, 1, 2, 3]
    assert make(masked=1.0).most_targets(torch.tensor([1, 5])).tolist() == [1, 5]
    assert float(model.most_targets(torch.tensor(5.5).double())) == pytest.approx(1.65)


@pytest.mark.parametrize("masked", [0.15, 0.5, 1.0])
def test_the_bounds_of_a_captured_step_hold(masked: float) -> None:
    model = make(masked=masked, last_only=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings, sizes = TrainingSettings(batch_size=6), {"device": CPU, "max_length": 6}
    step = TrainingStep(model, CrossEntropy(), optimizer, SEQUENCES, settings, **sizes)  # type: ignore[arg-type]
    for rows in torch.randperm(20).split(6):
        drawn, _ = model.draw(step.batch(rows).targets)
        most = step._max_targets(rows, captured=True)
        assert most is not None
        assert int((drawn != IGNORED).sum()) <= int(step.targets(rows).sum()) <= most
    of_seven_events = step.targets(torch.tensor([4]))
    assert torch.equal(of_seven_events, model.most_targets(torch.tensor([6])))
    assert step.max_targets == int(step.targets(torch.arange(20)).topk(6).values.sum())


def test_the_loss_of_several_batches_is_that_of_all_their_masks() -> None:
    model, rows = make(last_only=0.5, masked=0.6), torch.arange(14)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    given = model, CrossEntropy(), optimizer, SEQUENCES, TrainingSettings(batch_size=6)
    sizes: Any = {"device": CPU, "max_length": 6, "ranks": Ranks(), "slices": 3}
    step = SlicedStep(*given, **sizes)
    found, total, count = step(rows, SEEDS).loss, torch.zeros(()), 0
    for number, part in enumerate(rows.split(6)):
        step._seed(seeds_of_slice(SEEDS, number))
        batch = step.batch(part)
        targets, more = model.draw(batch.targets)
        states = model(batch.histories, batch.length_groups, **more)
        chosen = targets != IGNORED
        logits = states[chosen] @ model.catalogue.T
        total += nn.functional.cross_entropy(logits, targets[chosen], reduction="sum").detach()
        count += int(chosen.sum())
    assert count < int(step.targets(rows).sum())
    torch.testing.assert_close(found, total / count)


def test_it_learns_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = make_cycle(tmp_path / "data", train=200, items=40).path, tmp_path / "run"
    options = {"model.name": "bert4rec", "model.dim": 16, "model.max-length": 6, "device": "cpu"}
    options |= {"model.blocks": 1, "model.dropout": 0, "batch-size": 16, "learning-rate": 0.01}
    options |= {"model.masked": 0.5, "epochs": 20, "training.evaluate-every": 20}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    assert main(["train", str(data), "--out", str(out), *flags]) == 0
    capsys.readouterr()
    result = json.loads((out / "result.json").read_text())
    assert result["test"]["ndcg@10"] > 0.8
    assert result["popularity"]["test"]["ndcg@10"] < 0.2


def test_compiled_it_has_the_same_states() -> None:
    model = make().eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    whole, groups = model.inputs(HISTORIES, TARGETS), ((1, 4), (2, 2))
    torch.testing.assert_close(compiled(whole, groups, MASKED), model(whole, groups, MASKED))


@pytest.mark.filterwarnings("error::sce.errors.TrainingWarning")
def test_one_derived_from_it_is_not_told_that_it_looks_ahead(tmp_path: Path) -> None:
    class Mine(BERT4Rec):
        pass

    train(make_cycle(tmp_path / "data"), model=Mine(12, dim=8, max_length=7), epochs=1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"masked": 0.0}, "masked is a share above 0"),
        ({"last_only": 1.5}, "last_only is a share from 0 to 1"),
        ({"heads": 3}, "not a multiple of 3 heads"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        BERT4RecSettings(**wrong)
