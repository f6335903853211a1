"""What one pass over the states gives: marked targets, faults, and random centres."""

import pytest
import torch
from torch import Tensor

from tests.losses.kernels.made_problem import DEVICE, GPU

pytest.importorskip("triton")
from sce.losses.kernels.centres import Prepared, draw_seed, prepare

N = 4000 if GPU else 100  # buckets


def prepared(
    states: Tensor,
    targets: Tensor,
    *,
    seed: int = 7,
    mix: bool = True,
    mix_of: int = 0,
    noise: float = 0.0,
    n_buckets: int = 6,
) -> Prepared:
    return prepare(
        states.to(DEVICE), targets.to(DEVICE), None, torch.tensor([seed], device=DEVICE),
        n_items=50, n_buckets=n_buckets, size_y=1, mix=mix, mix_of=mix_of, noise=noise,
        dtype=torch.float32, ignore_index=-100,
    )  # fmt: skip


@pytest.mark.parametrize(("mix", "rank"), [(True, 16), (True, 3), (False, 16)])
def test_centres_have_the_covariance_of_the_valid_states(mix: bool, rank: int) -> None:
    g = torch.Generator().manual_seed(0)
    states = torch.randn(100, rank, generator=g) @ torch.randn(rank, 16, generator=g)
    targets = torch.randint(50, (100,), generator=g)
    targets[70:] = -100
    states[70:] = float("nan")
    found = prepared(states, targets, mix=mix, n_buckets=N)
    centres = found.centres.double().cpu()
    assert torch.allclose(centres.norm(dim=1), torch.ones(N, dtype=torch.float64), atol=1e-5)
    # Only directions are kept: compare with those of normal vectors of that covariance.
    covariance = states[:70].double().T @ states[:70].double() if mix else torch.eye(16).double()
    values, vectors = torch.linalg.eigh(covariance)
    factor = vectors * values.clamp(min=0).sqrt()
    normal = torch.randn(400_000, 16, generator=g, dtype=torch.float64) @ factor.T
    normal = torch.nn.functional.normalize(normal, dim=1)
    products = (centres.unsqueeze(2) * centres.unsqueeze(1)).flatten(1)
    for samples, expected in (
        (products, (normal.T @ normal / len(normal)).flatten()),
        (centres, torch.zeros(16, dtype=torch.float64)),
    ):
        error = samples.std(dim=0) / N**0.5 + 1e-3
        assert ((samples.mean(dim=0) - expected).abs() < 5 * error).all()
    assert found.status[:2].tolist() == [1, 1]


def test_a_mix_of_a_few_valid_states_has_positive_weights_and_all_alike() -> None:
    # Orthogonal states tell what a centre is a sum of. Some do not count, whole runs among them:
    # more states than one program looks at, which are then cut into splits.
    n = 3000
    numbers = torch.arange(n) % 16
    targets = torch.where(numbers < 11, 3, -100)
    targets[500:1200] = -100
    states = torch.eye(16)[numbers] * torch.where(targets < 0, float("nan"), 2.0)[:, None]
    buckets = 4000 if GPU else 150
    found = prepared(states, targets, mix_of=3, n_buckets=buckets)
    centres = found.centres.cpu()
    assert found.status[:2].tolist() == [1, 1]
    assert torch.allclose(centres.norm(dim=1), torch.ones(buckets), atol=1e-5)
    assert (centres >= 0).all()
    assert not centres[:, 11:].any()
    parts = (centres > 0).float()
    assert parts.sum(dim=1).max() == 3
    # Each of eleven kinds of states is in 1 - (10/11)³ of the sums.
    share = 1 - (10 / 11) ** 3
    error = 5 * (share * (1 - share) / buckets) ** 0.5
    assert ((parts.mean(dim=0)[:11] - share).abs() < error).all()


def test_a_mix_of_one_state_is_any_of_the_valid_ones() -> None:
    n = 300
    states = torch.nn.functional.normalize(torch.randn(n, 16))
    targets = torch.full((n,), -100)
    valid = torch.tensor([0, 1, 31, 32, 63, 64, 150, 298, 299])
    targets[valid] = 7
    centres = prepared(states, targets, mix_of=1, n_buckets=N).centres.cpu()
    closest = (centres @ states.T).max(dim=1)
    assert torch.allclose(closest.values, torch.ones(N), atol=1e-5)
    assert torch.equal(closest.indices.unique(), valid)


@pytest.mark.parametrize(("noise", "d"), [(0.5, 16), (3.0, 16), (2.0, 24)])
def test_noise_is_normal_and_as_long_as_it_says(noise: float, d: int) -> None:
    # Of one state alone, all that differs between centres is the noise.
    state = torch.zeros(1, d)
    state[0, 3] = 7.0
    n_buckets = 40_000 if GPU else 250
    found = prepared(state, torch.tensor([4]), mix_of=2, noise=noise, n_buckets=n_buckets)
    g = torch.Generator().manual_seed(0)
    expected = state / 7 + noise / d**0.5 * torch.randn(400_000, d, generator=g)
    expected = torch.nn.functional.normalize(expected, dim=1).double()
    centres = found.centres.double().cpu()
    for power in (1, 2, 4):
        samples = centres**power
        error = 5 * samples.std(dim=0) / n_buckets**0.5 + 2e-3
        assert ((samples.mean(dim=0) - (expected**power).mean(dim=0)).abs() < error).all()
    mixed = (centres[:, :-1] * centres[:, 1:]).mean(dim=0)  # directions are independent
    assert mixed.abs().max() < 6 / n_buckets**0.5 / d**0.5


def test_noise_alone_is_left_of_states_that_do_not_count() -> None:
    centres = prepared(torch.ones(3, 16), torch.full((3,), -100), mix_of=2, noise=2.0).centres
    assert torch.allclose(centres.norm(dim=1).cpu(), torch.ones(6))


@pytest.mark.parametrize(
    ("mix", "mix_of", "noise"), [(True, 0, 0.0), (True, 4, 0.0), (True, 2, 2.0), (False, 0, 0.0)]
)
def test_the_seed_says_which_centres(mix: bool, mix_of: int, noise: float) -> None:
    states, targets = torch.randn(40, 16), torch.randint(50, (40,))
    one, again, other = (
        prepared(states, targets, seed=seed, mix=mix, mix_of=mix_of, noise=noise).centres
        for seed in (7, 7, 7 + (1 << 40))
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
    assert torch.equal(wide.wanted, narrow.wanted)
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
    assert torch.equal(found.wanted.long().cpu(), targets.masked_fill(targets < 0, -1))
    assert found.status[:2].tolist() == [1, 1]
    states[1, 5] = float("nan")
    assert prepared(states, targets).status[:2].tolist() == [1, 0]
