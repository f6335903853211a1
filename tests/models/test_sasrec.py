import math
from collections.abc import Callable
from shutil import which
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sce.data.batches import PADDING
from sce.data.length_groups import LengthGroups
from sce.errors import InputError
from sce.models.sasrec import SASRec, SASRecSettings
from tests.models.small import N_ITEMS, random_histories, scaled_up, torch_parts


def make(**changes: float) -> SASRec:
    shape = {"dim": 16, "heads": 2, "max_length": 8, "dropout": 0.0} | changes
    return SASRec(N_ITEMS, SASRecSettings(**shape), seed=1).eval()  # type: ignore[arg-type]


def plain_states(model: SASRec, history: Tensor) -> Tensor:
    """One history through nn.MultiheadAttention with the model's weights, step by step.

    With a sink as in the paper's code: padded on the left to the full length with states of zeros,
    which every block attends to, and which are set to zero again after it.
    """
    dim, length = model.settings.dim, len(history)
    states = model.catalogue[history] * math.sqrt(dim)
    states = states + model.positions[model.max_length - length :]
    pads = model.max_length - length if model.settings.sink else 0
    states = F.pad(states, (0, 0, pads, 0))
    later = torch.ones(len(states), len(states), dtype=torch.bool).triu(1)
    for layer in model.blocks:
        block, attention = torch_parts(layer, model.settings.heads)
        norm = (block["attention_norm.weight"], block["attention_norm.bias"])
        queries = F.layer_norm(states, (dim,), *norm, eps=1e-8)
        attended, _ = attention(queries[None], states[None], states[None], attn_mask=later)
        states = queries + attended[0]
        norm = (block["forward_norm.weight"], block["forward_norm.bias"])
        states = F.layer_norm(states, (dim,), *norm, eps=1e-8)
        inner = torch.relu(states @ block["inner.weight"].T + block["inner.bias"])
        states = states + inner @ block["outer.weight"].T + block["outer.bias"]
        states = F.pad(states[pads:], (0, 0, pads, 0))
    weights = dict(model.named_parameters())
    return F.layer_norm(
        states[pads:], (dim,), weights["norm.weight"], weights["norm.bias"], eps=1e-8
    )


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("sink", [True, False])
def test_states_equal_a_plain_multihead_attention(heads: int, blocks: int, sink: bool) -> None:
    model = scaled_up(make(heads=heads, blocks=blocks, sink=sink)).double()
    lengths = (1, 5, 8, 3)
    histories = random_histories(*lengths)
    states = model(histories)
    for row, length in enumerate(lengths):
        expected = plain_states(model, histories[row, :length])
        torch.testing.assert_close(states[row, :length], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("groups", [((1, 8), (3, 5)), ((2, 8), (1, 4), (1, 1)), ((4, 8),)])
def test_length_groups_change_neither_states_nor_gradients(
    sink: bool, groups: LengthGroups
) -> None:
    model = scaled_up(make(sink=sink)).double()
    lengths = (7, 5, 4, 1)
    histories = random_histories(*lengths, width=8)
    real = histories != PADDING
    found = []
    for states in (model(histories), model(histories, groups)):
        model.zero_grad()
        kept = states[real]
        (kept * torch.arange(kept.numel()).view_as(kept).sin()).sum().backward()
        found.append((kept, [weight.grad.clone() for weight in model.parameters()]))  # type: ignore[union-attr]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_what_is_outside_of_the_groups_is_not_computed() -> None:
    seen = []
    model = make()
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    states = model(random_histories(8, 2, 1), ((1, 8), (2, 2)))
    assert states.shape == (3, 8, 16)
    assert seen == [8 + 2 * 2]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (((2, 6),), "not those of a batch of shape"),
        (((3, 7),), "not those of a batch of shape"),
        (((4, 6), (-1, 6)), "not those of a batch of shape"),
        (((3, 0),), "not those of a batch of shape"),
        ((), "not those of a batch of shape"),
        (((1, 6), (2, 3)), "longer than their groups"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups: LengthGroups, message: str) -> None:
    model = make()
    with pytest.raises(InputError, match=message):
        model(torch.ones(3, 6, dtype=torch.int64), groups)


def test_the_place_of_an_item_matters_and_is_counted_from_the_end() -> None:
    model = scaled_up(make())
    alone, followed = model(torch.tensor([[3]])), model(torch.tensor([[3, 4]]))
    assert not torch.allclose(alone[0, 0], followed[0, 0])
    with torch.no_grad():
        # Only the table's last rows are used, whatever the width of the batch.
        model.positions[:-2] = math.nan
    assert torch.equal(model(torch.tensor([[3, 4]])), followed)
    assert model(torch.tensor([[3, 4, PADDING, PADDING]]))[0, :2].isfinite().all()
    assert model(torch.tensor([[3, 4, 5]])).isnan().any()


def test_nothing_depends_on_values() -> None:
    # Tensors on the meta device have no values: looking at one, as a wait for a GPU would, raises.
    model = SASRec(N_ITEMS, make(dropout=0.5).settings).to("meta").train()
    states = model(torch.zeros(2, 5, dtype=torch.int64, device="meta"))
    assert states.shape == (2, 5, 16)
    states.sum().backward()


def test_rows_of_padding_alone_are_harmless() -> None:
    model = scaled_up(make())
    histories = torch.tensor([[PADDING, PADDING], [1, 2]])
    assert model(histories).isfinite().all()
    torch.testing.assert_close(model(histories)[1], model(histories[1:])[0])


@pytest.mark.parametrize("training", [True, False])
def test_attention_drops_in_training_only(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention

    def listen(*tensors: Tensor, dropout_p: float, **options: Any) -> Tensor:
        seen.append(dropout_p)
        return attention(*tensors, dropout_p=dropout_p, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", listen)
    make(dropout=0.3).train(training)(random_histories(8, 2), ((1, 8), (1, 2)))
    assert seen == 4 * [0.3 if training else 0.0]  # two blocks, two groups


def test_dropout_acts_in_training_only() -> None:
    model = scaled_up(make(dropout=0.5))
    histories = random_histories(6, 4)
    assert torch.equal(model(histories), model(histories))
    model.train()
    torch.manual_seed(0)
    first, second = model(histories), model(histories)
    torch.manual_seed(0)
    again = model(histories)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_fresh_weights_are_spread_as_in_the_papers_code() -> None:
    model = SASRec(5000, SASRecSettings(dim=64), seed=0)
    bounds = {
        "catalogue": math.sqrt(6 / (5000 + 64)),
        "positions": math.sqrt(6 / (200 + 64)),
        "blocks.0.query.weight": math.sqrt(6 / (64 + 192)),
        "blocks.0.key_value.weight": math.sqrt(6 / (64 + 192)),
        "blocks.0.attention_out.weight": math.sqrt(6 / 128),
        "blocks.1.inner.weight": math.sqrt(6 / 128),
        "blocks.1.outer.bias": 1 / 8,
    }
    weights = dict(model.named_parameters())
    for name, bound in bounds.items():
        assert 0.9 * bound < weights[name].abs().max() <= bound, name
        assert weights[name].std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15), name
    for name in ("query.bias", "key_value.bias", "attention_out.bias"):
        assert not weights[f"blocks.0.{name}"].any()


@pytest.mark.parametrize("sink", [True, False])
def test_exported_it_takes_batches_of_any_size_and_length(sink: bool) -> None:
    model = scaled_up(make(sink=sink))
    sizes = {"histories": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=8)}}
    exported = torch.export.export(model, (random_histories(6, 3),), dynamic_shapes=sizes).module()
    for lengths in ([1], [8, 2], [3, 1, 3], [5] * 20):
        histories = random_histories(*lengths)
        assert torch.equal(exported(histories), model(histories))


def test_bfloat16_autocast_stays_close() -> None:
    model = scaled_up(make())
    histories = random_histories(8, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = model(histories)
    torch.testing.assert_close(states.float(), model(histories), rtol=0.1, atol=0.1)
    states.float().square().sum().backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "dim 64 is not a multiple of 3 heads"),
        ({"dim": 0}, "dim must be at least 1; got 0"),
        ({"blocks": 0}, "blocks must be at least 1"),
        ({"blocks": 10**6}, "blocks must be at most 1,000"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"dropout": 1.0}, "dropout is a share"),
        ({"dropout": -0.1}, "dropout is a share"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SASRecSettings(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("histories", "message"),
    [
        (torch.zeros(1, 9, dtype=torch.int64), "9 events do not fit max_length 8; give the last 8"),
        (torch.zeros(3, dtype=torch.int64), r"shape \[batch, length\]"),
        (torch.zeros(1, 3), "got torch.float32"),
        (torch.tensor([[N_ITEMS, 1]]), "item 30 is not in the catalogue of 30 items"),
        (torch.tensor([[-100, 1]]), "item -100 is not in the catalogue"),
        (torch.tensor([[PADDING, 1]]), "padded on the right"),
        (torch.tensor([[1, PADDING, 2]]), "without gaps"),
    ],
)
def test_impossible_histories_are_refused(histories: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()(histories)


def test_settings_are_given_by_name_or_all_at_once() -> None:
    settings = SASRecSettings(dim=8, max_length=5)
    assert SASRec(3, dim=8, max_length=5).settings == SASRec(3, settings).settings == settings
    assert SASRec(3, settings, dim=4).settings == SASRecSettings(dim=4, max_length=5)
    with pytest.raises(TypeError, match="padding_side"):
        SASRec(3, padding_side="left")
    with pytest.raises(InputError, match="at least one item"):
        SASRec(0)


def test_compiled_with_a_sparse_gradient() -> None:
    backend = "inductor" if which("c++") else "aot_eager"  # of which the former is a part
    model = SASRec(N_ITEMS, make(blocks=1).settings)
    model.sparse_grad = True
    # Without vectors, and of one block: compiling C++ takes half a minute even so.
    options: Any = {"cpp.simdlen": 1} if backend == "inductor" else None
    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend=backend, options=options)
    histories = torch.tensor([[3, 1, 3, 2], [5, 3, PADDING, PADDING]])
    found = []
    for forward in (model, compiled):
        model.zero_grad()
        states = forward(histories)
        states.square().sum().backward()
        assert model.catalogue.grad is not None
        assert model.catalogue.grad.is_sparse
        found.append((states.detach(), model.catalogue.grad.to_dense()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
