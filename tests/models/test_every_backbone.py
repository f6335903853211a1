"""Tests that hold for every backbone alike: those of the table, with its defaults."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.data.batches import PADDING
from sce.errors import InputError
from sce.models.base import Backbone
from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from tests.models.small import N_ITEMS, random_histories, scaled_up

every_backbone = pytest.mark.parametrize("name", BACKBONES)
HISTORIES = torch.tensor([[3, 7, 5, 7, 1], [2, 9, 4, PADDING, PADDING], [8] + 4 * [PADDING]])
REAL = HISTORIES != PADDING


def fresh(name: str, seed: int = 1) -> Backbone:
    settings: Any = BACKBONES[name].settings
    return settings(dim=16, max_length=8).build(N_ITEMS, seed=seed).eval()  # type: ignore[no-any-return]


def make(name: str) -> Backbone:
    return scaled_up(fresh(name))


@every_backbone
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), extra=st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_states_depend_on_neither_padding_nor_groups(
    name: str, lengths: list[int], extra: int
) -> None:
    lengths, model = sorted(lengths, reverse=True), make(name).double()
    trimmed = random_histories(*lengths)
    wider = random_histories(*lengths, width=lengths[0] + extra)
    groups = tuple((1, length + extra) for length in lengths)
    states, *others = model(trimmed), model(wider), model(wider, groups)
    assert states.shape == (len(lengths), lengths[0], 16)
    for row, length in enumerate(lengths):
        alone = model(trimmed[row : row + 1, :length])[0]
        for found in (states, *others):
            torch.testing.assert_close(found[row, :length], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "module"), [("sasrec", "sce.models.transformer"), ("gru4rec", "sce.models.gru4rec")]
)
def test_padding_before_an_event_is_noticed_where_values_are_not_looked_at(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU nothing may look at values: there the lookup of items must fail.
    model = make(name)
    wrong = torch.tensor([[PADDING, 1]]), torch.tensor([[1, PADDING, 2]])
    for history in wrong:
        with pytest.raises(InputError, match="padded on the right"):
            model(history)
    monkeypatch.setattr(type(model), "check", lambda self, histories: None)
    for history in wrong:
        with pytest.raises(IndexError):
            model(history)
    monkeypatch.setattr(f"{module}.check_groups", lambda histories, groups: groups)
    with pytest.raises(IndexError):  # the second history is longer than its group is wide
        model(torch.ones(2, 6, dtype=torch.int64), ((1, 6), (1, 5)))
    with pytest.raises(IndexError):  # nothing of it is inside
        model(torch.tensor([[1, 2, 3, 4], [PADDING, PADDING, PADDING, 5]]), ((1, 4), (1, 2)))


@every_backbone
def test_the_last_state_is_encoded_from_embedded_items_alone(name: str) -> None:
    model, lengths = make(name), REAL.sum(1)
    embedded = model.catalogue[HISTORIES.clamp(min=0)].detach()
    wanted = model(HISTORIES)[torch.arange(3), lengths - 1]
    torch.testing.assert_close(model.encode(embedded, lengths), wanted)
    embedded[~REAL] = 1e3  # arbitrary
    model.catalogue.data.fill_(torch.nan)
    torch.testing.assert_close(model.encode(embedded, lengths), wanted)


@pytest.mark.parametrize("name", [n for n, one in BACKBONES.items() if not one.backbone.draws])
def test_a_later_item_changes_no_earlier_state_of_as_many_events(name: str) -> None:
    model, other = make(name), HISTORIES.clone()
    other[0, 3] = 0
    before, after = model(HISTORIES)[0], model(other)[0]
    assert torch.equal(before[:3], after[:3])
    assert (before[3:] != after[3:]).any(dim=1).all()


@every_backbone
def test_the_catalogue_is_exactly_the_items_and_live(name: str) -> None:
    model = make(name)
    assert model.catalogue.shape == (N_ITEMS, 16)
    before = model(HISTORIES)
    with torch.no_grad():
        model.catalogue[5] *= 2
    after = model(HISTORIES)
    assert torch.equal(before[1:][REAL[1:]], after[1:][REAL[1:]])
    assert (before[0, 2:] != after[0, 2:]).any(dim=1).all()
    assert model.draws or torch.equal(before[0, :2], after[0, :2])


@every_backbone
def test_all_weights_and_no_padding_learn_and_a_sparse_gradient_is_the_dense_one(name: str) -> None:
    model, found = make(name), []
    for model.sparse_grad in (False, True):
        states = model(HISTORIES)[REAL]
        # The final layer norm takes no gradient of a plain sum: weigh the places.
        weights = torch.arange(states.numel()).view_as(states).sin()
        (states * weights).sum().backward()
        for key, weight in model.named_parameters():
            assert weight.grad is not None, key
            assert weight.grad.is_sparse is (model.sparse_grad and key == "catalogue"), key
            assert weight.grad.abs().sum() > 0, key
        found.append(model.catalogue.grad)
        model.zero_grad()
    dense, sparse = found
    assert dense is not None
    assert sparse is not None
    assert dense.abs().sum(1).nonzero().squeeze(1).tolist() == [*range(1, 6), *range(7, 10)]
    looked_up = HISTORIES.numel() + len(HISTORIES) * model.draws  # which has a place more
    assert sparse._nnz() == looked_up
    torch.testing.assert_close(sparse.to_dense(), dense)


@every_backbone
def test_weights_follow_from_the_seed_and_are_counted_on_the_meta_device(name: str) -> None:
    state = torch.get_rng_state()
    first, again, other = (dict(fresh(name, seed).named_parameters()) for seed in (5, 5, 6))
    assert torch.equal(state, torch.get_rng_state())
    assert all(weight.isfinite().all() for weight in first.values())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["catalogue"], other["catalogue"])
    with torch.device("meta"):
        counted = dict(fresh(name).named_parameters())
    assert {k: v.shape for k, v in counted.items()} == {k: v.shape for k, v in first.items()}
    assert all(weight.is_meta for weight in counted.values())


@every_backbone
def test_activations_grow_with_the_batch_and_shrink_by_half_precision(name: str) -> None:
    model = make(name)
    small, large = (model.activation_bytes(n, 5 * n, half=False) for n in (2, 20))
    assert 0 < 9 * small < large < 11 * small
    half = model.activation_bytes(2, 10, half=True)
    assert half == small if name == "gru4rec" else half < small  # which is not rounded


@every_backbone
def test_training_knows_the_class_of_the_table(name: str) -> None:
    model: Any = make(name)
    assert type(model) is BACKBONES[name].backbone
    assert (model.max_length, model.settings.dim) == (8, 16)


@every_backbone
def test_compiled_it_has_the_same_states(name: str) -> None:
    model, first = make(name).double(), name == DEFAULT_BACKBONE
    torch._dynamo.reset()
    # cuDNN's recurrent layers are called as they are, between two graphs.
    options: Any = {"backend": "aot_eager" if first else "eager", "fullgraph": name != "gru4rec"}
    compiled = torch.compile(model, **options)
    found = []
    for forward in (model, compiled):
        model.zero_grad()
        states = forward(HISTORIES)
        states.sin().sum().backward()
        found.append((states.detach(), model.catalogue.grad))
    torch.testing.assert_close(found[1], found[0])
    if first:  # of all others it takes seconds
        grouped = compiled(HISTORIES, ((1, 5), (2, 3)))
        torch.testing.assert_close(grouped[REAL], states.detach()[REAL])
