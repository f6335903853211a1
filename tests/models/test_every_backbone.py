"""Tests that hold for every backbone alike: those of the table, with its defaults."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sce.data.batches import PADDING
from sce.models.base import Backbone
from sce.models.registry import BACKBONES

every_backbone = pytest.mark.parametrize("name", BACKBONES)
HISTORIES = torch.tensor([[3, 7, 5, 7, 1], [2, 9, 4, PADDING, PADDING], [8] + 4 * [PADDING]])
REAL = HISTORIES != PADDING


def make(name: str, **options: Any) -> Backbone:
    settings: Any = BACKBONES[name].settings
    return settings(dim=16, max_length=8, **options).build(12, seed=1).eval()  # type: ignore[no-any-return]


@every_backbone
def test_states_depend_on_neither_padding_nor_groups(name: str) -> None:
    model = make(name)
    states = model(HISTORIES)
    assert states.shape == (3, 5, 16)
    wider = torch.nn.functional.pad(HISTORIES, (0, 3), value=PADDING)
    for row, length in enumerate(REAL.sum(1).tolist()):
        alone = model(HISTORIES[row : row + 1, :length])[0]
        torch.testing.assert_close(states[row, :length], alone)
    torch.testing.assert_close(model(wider)[:, :5][REAL], states[REAL])
    grouped = model(HISTORIES, length_groups=((1, 5), (2, 3)))
    torch.testing.assert_close(grouped[REAL], states[REAL])


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
    torch.testing.assert_close(before[:3], after[:3])
    assert not torch.allclose(before[3:], after[3:])


@every_backbone
def test_the_catalogue_is_live_and_all_weights_learn(name: str) -> None:
    model = make(name)
    assert model.catalogue.shape == (12, 16)
    before = model(HISTORIES)
    before[REAL].square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    with torch.no_grad():
        model.catalogue.mul_(2)
    assert not torch.allclose(model(HISTORIES)[REAL], before[REAL])


@every_backbone
def test_a_sparse_gradient_is_the_dense_one(name: str) -> None:
    model, found = make(name), []
    for model.sparse_grad in (False, True):
        (gradient,) = torch.autograd.grad(model(HISTORIES)[REAL].square().sum(), model.catalogue)
        assert gradient.is_sparse is model.sparse_grad
        found.append(gradient.to_dense())
    torch.testing.assert_close(*found)


@every_backbone
def test_weights_follow_from_the_seed_and_are_counted_on_the_meta_device(name: str) -> None:
    state = torch.get_rng_state()
    first, again = (dict(make(name).named_parameters()) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    with torch.device("meta"):
        counted = dict(make(name).named_parameters())
    assert {k: v.shape for k, v in counted.items()} == {k: v.shape for k, v in first.items()}
    assert all(weight.is_meta for weight in counted.values())


@every_backbone
def test_activations_grow_with_the_batch_and_shrink_by_half_precision(name: str) -> None:
    model = make(name)
    small, large = (model.activation_bytes(n, 5 * n, half=False) for n in (2, 20))
    assert 0 < 9 * small < large < 11 * small
    assert model.activation_bytes(2, 10, half=True) < small


@every_backbone
def test_training_knows_the_class_of_the_table(name: str) -> None:
    model: Any = make(name)
    assert type(model) is BACKBONES[name].backbone
    assert (model.max_length, model.settings.dim) == (8, 16)
    restored: Tensor = model.settings.build(12, seed=2).eval()(HISTORIES)
    assert not torch.allclose(restored, model(HISTORIES))


@every_backbone
def test_compiled_it_has_the_same_states(name: str) -> None:
    model = make(name)
    torch._dynamo.reset()
    # cuDNN's recurrent layers are called as they are, between two graphs.
    compiled = torch.compile(model, backend="eager", fullgraph=name != "gru4rec")
    torch.testing.assert_close(compiled(HISTORIES), model(HISTORIES))
