"""What one pass over the states gives: marked targets, faults, and random centres."""

import pytest
import torch
from torch import Tensor

from sce.losses.buckets import Centres, draw_centres
from tests.losses.kernels.made_problem import DEVICE, GPU

pytest.importorskip("triton")
from sce.losses.kernels.centres import Prepared, draw_seed, prepare

N = 4000 if GPU else 80  # buckets


def prepared(
    states: Tensor, targets: Tensor, kind: Centres = "mix", *, seed: int = 7, n_buckets: int = 6
) -> Prepared:
    return prepare(
        states.to(DEVICE), targets.to(DEVICE), None, torch.tensor([seed], device=DEVICE),
        n_items=50, n_buckets=n_buckets, size_y=1, kind=kind, dtype=torch.float32,
        ignore_index=-100,
    )  # fmt: skip


def states_of_rank(rank: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    states = torch.randn(100, rank, generator=g) @ torch.randn(rank, 16, generator=g)
    targets = torch.randint(50, (100,), generator=g)
    targets[70:] = -100
    return states, targets


def orthogonal_states() -> tuple[Tensor, Tensor]:
    """Few valid states, at the ends of what one program looks at, each its own direction."""
    states, targets = torch.zeros(300, 24), torch.full((300,), -100)
    valid = torch.tensor([0, 1, 31, 32, 63, 64, 150, 298, 299])
    states[valid], targets[valid] = 2 * torch.eye(24)[:9], 7
    return states, targets


def many_states() -> tuple[Tensor, Tensor]:
    """More states than one program looks at; whole runs are not valid."""
    numbers = torch.arange(3000) % 16
    targets = torch.where(numbers < 11, 3, -100)
    targets[500:1200] = -100
    return torch.eye(16)[numbers], targets


def moments(centres: Tensor) -> list[Tensor]:
    products = (centres.unsqueeze(2) * centres.unsqueeze(1)).flatten(1)
    return [centres, products, centres**4]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("random", states_of_rank(16)),
        ("mix", states_of_rank(16)),
        ("mix", states_of_rank(3)),
        ("states", states_of_rank(3)),
        ("states", orthogonal_states()),
        ("states", many_states()),
    ],
    ids=["random", "mix", "mix of rank 3", "states", "few states", "many states"],
)
def test_centres_are_distributed_as_in_the_plain_path(
    kind: Centres, problem: tuple[Tensor, Tensor]
) -> None:
    states, targets = problem
    valid = targets >= 0
    g = torch.Generator().manual_seed(0)
    expected = draw_centres(states[valid].double(), 50_000, kind, generator=g)
    expected = torch.nn.functional.normalize(expected, dim=1)
    spoiled = states.masked_fill(~valid[:, None], float("nan"))
    found = prepared(spoiled, targets, kind, n_buckets=N)
    assert found.status[:2].tolist() == [1, 1]
    centres = found.centres.double().cpu()
    assert torch.allclose(centres.norm(dim=1), torch.ones(N, dtype=torch.float64), atol=1e-5)
    for samples, drawn in zip(moments(centres), moments(expected), strict=True):
        error = 5 * samples.std(dim=0) / N**0.5 + 2e-3
        assert ((samples.mean(dim=0) - drawn.mean(dim=0)).abs() < error).all()


def test_noise_alone_is_left_where_no_state_is_valid() -> None:
    centres = prepared(torch.ones(3, 16), torch.full((3,), -100), "states").centres
    assert torch.allclose(centres.norm(dim=1).cpu(), torch.ones(6))


@pytest.mark.parametrize("kind", ["random", "states", "mix"])
def test_the_seed_says_which_centres(kind: Centres) -> None:
    states, targets = torch.randn(40, 16), torch.randint(50, (40,))
    one, again, other = (
        prepared(states, targets, kind, seed=seed).centres for seed in (7, 7, 7 + (1 << 40))
    )
    assert torch.equal(one, again)
    assert (one != other).float().mean() > 0.9


@pytest.mark.parametrize("d", [72, 136, 264, 512])
def test_the_width_changes_nothing_but_the_tiles(d: int) -> None:
    g = torch.Generator().manual_seed(0)
    states = torch.nn.functional.pad(torch.randn(70, 16, generator=g), (0, d - 16))
    targets = torch.randint(50, (70,), generator=g)
    targets[::3] = -100
    narrow = prepared(states[:, :16].contiguous(), targets, n_buckets=20)
    wide = prepared(states, targets, n_buckets=20)
    torch.testing.assert_close(wide.centres[:, :16], narrow.centres, rtol=1e-5, atol=1e-6)
    assert not wide.centres[:, 16:].any()
    assert torch.equal(wide.targets, narrow.targets)
    states[1, -1] = float("inf")  # not ignored, and in the last columns
    assert prepared(states, targets).status[:2].tolist() == [1, 0]


def test_seeds_come_from_the_generator() -> None:
    device = torch.device(DEVICE)
    g = torch.Generator(DEVICE).manual_seed(3)
    drawn = [draw_seed(device, g) for _ in range(20)]
    g.manual_seed(3)
    assert all(torch.equal(seed, draw_seed(device, g)) for seed in drawn)
    assert len({int(seed) for seed in drawn}) == 20
    assert max(int(seed) for seed in drawn) > 1 << 32


def test_targets_are_marked_and_faults_are_told() -> None:
    states, targets = torch.randn(40, 16), torch.randint(50, (40,))
    targets[::3] = -100
    states[0] = float("inf")  # ignored
    found = prepared(states, targets)
    assert torch.equal(found.targets.long().cpu(), targets.masked_fill(targets < 0, -1))
    assert found.status[:2].tolist() == [1, 1]
    states[1, 5] = float("nan")
    assert prepared(states, targets).status[:2].tolist() == [1, 0]
