"""Synthetic interaction logs that a sequential model can learn and popularity cannot.

Items have Zipf popularity and belong to clusters. A user walks: most steps go to the one successor
of the item before, some jump inside the cluster, some move on to a neighbouring cluster of a sparse
graph. Between the steps of the walk lie a few globally popular items that have nothing to do with
it. All rules are hashes of the seed, so a catalogue of ten million items needs no table. Every
block of users has a random stream of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from sce.errors import InputError, check_types
from sce.memory import require_memory

Integers = NDArray[np.int64]

BLOCK_USERS = 8192
_NOISE = 0.1  # share of events that are popular items outside the walk
_FOLLOW = 0.8  # share of the walk's steps that go to the successor of the item before
_MOVE = 0.5  # share of the walk's other steps that leave the cluster for a neighbour
_DAY = 86_400
_FIRST_SECOND = 1_577_836_800  # 2020-01-01
_START_DAYS = 365  # between the first user's start and the last one's
_ACTIVE_DAYS = 14  # between a user's first and last event, on average
_ITEM_SKEW, _CLUSTER_SKEW = 1.0, 0.5  # Zipf exponents
_NEIGHBOURS = 4  # of a cluster, the first the likeliest
_FIRST_TIER = 8  # items; each further tier of a cluster is twice as large
_LONGEST = 8  # times the mean number of events
_FIRST_NEIGHBOUR = 64  # in the hash: no cluster has that many tiers
_ROUNDS = range(128, 132)  # in the hash: neither tiers nor neighbours
_AT_ONCE = 1 << 16  # items
_WORDS = """
Amber Antique Ashen Azure Bold Brass Bright Bronze Carved Charcoal Classic Cobalt Copper Coral
Cosy Cream Crimson Dusky Emerald Faded Floral Folding Frosted Gilded Glossy Golden Grey Hazel
Heavy Indigo Ivory Jade Large Lemon Light Lilac Little Maroon Matt Mint Modern Narrow Oaken Olive
Pale Patterned Plain Polished Quiet Rosy Round Ruby Rustic Sandy Scarlet Silver Slim Smoky Soft
Sturdy Tall Teal Violet Woven

attic balcony barn bath beach bedside boat cabin camping cellar corner desk dining field forest
garden garage hall harbour kitchen lake library loft market meadow mountain nursery office orchard
park patio picnic pool porch river school shore studio travel workshop

basket bench blanket board book bottle bowl box brush bucket cabinet candle chair clock cup curtain
cushion drawer easel fan frame glass hammock hook jug kettle ladder lamp mat mirror mug pillow pot
rack radio rug shelf stool table tray
"""
_ADJECTIVES, _PLACES, _THINGS = (words.split() for words in _WORDS.split("\n\n"))


@dataclass(frozen=True)
class SyntheticSettings:
    """Settings of a log; equal settings give equal logs."""

    cluster_size: ClassVar[int] = 100  # items

    items: int = 100_000
    """Items in the catalogue; the rarest may not occur in a small log."""
    users: int = 20_000
    """Users, each with one sequence."""
    seed: int = 0
    """Everything random follows from it."""
    mean_events: float = 40.0
    """Events per user, on average."""
    min_events: int = 20
    """Events of the least active user."""

    def __post_init__(self) -> None:
        check_types(vars(self), get_type_hints(type(self)))
        if self.items < 2 * self.cluster_size:
            raise InputError(
                f"a catalogue needs two clusters of {self.cluster_size} items or more; got "
                f"{self.items} items"
            )
        if (
            self.users < 1
            or self.seed < 0
            or not 1 <= self.min_events <= self.mean_events < math.inf
        ):
            raise InputError(
                "users and min_events must be at least 1, the seed not negative and mean_events no "
                f"smaller than min_events; got {self}"
            )

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return self.items // self.cluster_size


class Block(NamedTuple):
    """The events of some users, user after user, in time order."""

    users: Integers
    items: Integers
    timestamps: Integers  # seconds since 1970; strictly increasing within a user


def generate(settings: SyntheticSettings, part: int = 0, parts: int = 1) -> Iterator[Block]:
    """Yield the log in blocks of `BLOCK_USERS` users; or every so many of them, from one on."""
    for first in range(part * BLOCK_USERS, settings.users, parts * BLOCK_USERS):
        count = min(BLOCK_USERS, settings.users - first)
        # Uniform draws only: numpy keeps that stream stable between versions.
        random = np.random.Generator(np.random.PCG64([settings.seed, first // BLOCK_USERS]))
        extra = _exponential(random, count, mean=settings.mean_events - settings.min_events)
        longest = int(_LONGEST * settings.mean_events)
        lengths = np.minimum(settings.min_events + extra, longest)
        events = count * int(lengths.max())
        require_memory(40 * events, f"a block of users with up to {lengths.max():,} events")
        ranks = _walk(settings, lengths, random)
        times = _times(settings, lengths, random)
        real = np.arange(lengths.max()) < lengths[:, None]
        yield Block(
            users=np.repeat(np.arange(first, first + count), lengths),
            items=item_ids(settings, ranks[real]),
            timestamps=times[real],
        )


def _walk(settings: SyntheticSettings, lengths: Integers, random: np.random.Generator) -> Integers:
    """Popularity ranks of each user's items, [users, longest]."""
    # Longest first: the users still walking are always the first ones.
    order = np.argsort(-lengths, kind="stable")
    walking = np.searchsorted(-lengths[order], -np.arange(lengths.max()), side="left")
    # Step after step in memory: the search for repeats compares whole rows of it.
    ranks = np.zeros((lengths.max(), len(lengths)), dtype=np.int64)
    start = _zipf(random.random(len(lengths)), settings.clusters, _CLUSTER_SKEW)
    current = _draw_inside(settings, start, random.random(len(lengths)))
    for step, count in enumerate(walking):
        kind, where, inside, interrupt, anywhere = random.random((5, count))
        before = current[:count]
        after = _successors(settings, before)
        jumping = np.flatnonzero(kind < 1 - _FOLLOW)
        moving = kind[jumping] < _MOVE * (1 - _FOLLOW)
        clusters = before[jumping] % settings.clusters
        nearby = _neighbours(settings, clusters, where[jumping])
        clusters = np.where(moving, nearby, clusters)
        after[jumping] = _draw_inside(settings, clusters, inside[jumping])
        interrupted = np.flatnonzero(interrupt < _NOISE)
        after[interrupted] = _zipf(anywhere[interrupted], settings.items, _ITEM_SKEW)
        after = _avoid_repeats(settings, after, ranks[:step, :count])
        ranks[step, :count] = after
        # An interruption does not move the walk: it goes on from the item before.
        after[interrupted] = before[interrupted]
        current[:count] = after
    return np.ascontiguousarray(ranks[:, np.argsort(order)].T)


def _avoid_repeats(settings: SyntheticSettings, ranks: Integers, seen: Integers) -> Integers:
    """Go on from an item that the user has had: through its tier first, then down the cluster."""
    ranks = ranks.copy()
    doubtful = np.flatnonzero((seen == ranks).any(axis=0))
    for attempt in range(4 * _FIRST_TIER):
        if not len(doubtful):
            break
        further = _successors(settings, ranks[doubtful])
        if attempt >= _FIRST_TIER:
            places, clusters = np.divmod(ranks[doubtful], settings.clusters)
            places = (places + _FIRST_TIER // 2) % _sizes(settings, clusters)
            further = places * settings.clusters + clusters
        ranks[doubtful] = further
        doubtful = doubtful[(seen[:, doubtful] == further).any(axis=0)]
    return ranks


def _times(settings: SyntheticSettings, lengths: Integers, random: np.random.Generator) -> Integers:
    """Strictly increasing times, [users, longest]: each user is active for a while only."""
    start = random.random((len(lengths), 1)) * _START_DAYS * _DAY
    mean_gap = _ACTIVE_DAYS * _DAY / settings.mean_events
    gaps = 1 + _exponential(random, (len(lengths), int(lengths.max())), mean=mean_gap)
    return np.asarray(_FIRST_SECOND + start.astype(np.int64) + gaps.cumsum(axis=1))


# Items are known here by their rank in popularity. Rank r is in cluster r mod clusters, where it is
# at place r div clusters: every cluster has popular and rare items.


def _draw_inside(
    settings: SyntheticSettings, clusters: Integers, uniform: NDArray[np.float64]
) -> Integers:
    places = _zipf(uniform, _sizes(settings, clusters), _ITEM_SKEW)
    return places * settings.clusters + clusters


def _successors(settings: SyntheticSettings, ranks: Integers) -> Integers:
    """Rotate the tier that an item is in, by a number of places of the tier's own.

    A tier is a run of similarly popular items of a cluster, so that following successors for long
    leaves the popularity of items as it is.
    """
    places, clusters = np.divmod(ranks, settings.clusters)
    tiers = np.log2(places // _FIRST_TIER + 1).astype(np.int64)
    first = _FIRST_TIER * ((1 << tiers) - 1)
    size = np.minimum(_FIRST_TIER << tiers, _sizes(settings, clusters) - first)
    # Odd, so that a rotation of a whole tier (a power of two) visits all of it.
    turns = _hash(settings, clusters, tiers) % np.maximum(size // 2, 1).astype(np.uint64)
    places = first + (places - first + 2 * turns.astype(np.int64) + 1) % size
    return np.asarray(places * settings.clusters + clusters)


def _neighbours(
    settings: SyntheticSettings, clusters: Integers, uniform: NDArray[np.float64]
) -> Integers:
    which = (uniform**2 * _NEIGHBOURS).astype(np.int64)
    drawn = _hash(settings, clusters, which + _FIRST_NEIGHBOUR).astype(np.float64) / 2.0**64
    found = _zipf(drawn, settings.clusters, _CLUSTER_SKEW)
    # The last neighbour closes a ring through all clusters, so that none is out of reach.
    ring = (clusters + 1) % settings.clusters
    return np.where((which == _NEIGHBOURS - 1) | (found == clusters), ring, found)


def _sizes(settings: SyntheticSettings, clusters: Integers) -> Integers:
    return (settings.items - 1 - clusters) // settings.clusters + 1


def item_ids(settings: SyntheticSettings, ranks: Integers) -> Integers:
    """Permute ranks by a Feistel network: an id says nothing about popularity or cluster."""
    half = (settings.items - 1).bit_length() // 2 + 1
    mask = (1 << half) - 1
    ids = ranks.copy()
    outside = np.arange(len(ids))
    while len(outside):  # the network permutes a power of four: walk on until inside again
        left, right = ids[outside] >> half, ids[outside] & mask
        for key in _ROUNDS:
            mixed = _hash(settings, right, np.full_like(right, key))
            left, right = right, left ^ (mixed & np.uint64(mask)).astype(np.int64)
        ids[outside] = right << half | left
        outside = outside[ids[outside] >= settings.items]
    return ids


def _zipf(uniform: NDArray[np.float64], sizes: Integers | int, exponent: float) -> Integers:
    """Ranks 0 … sizes - 1 with probability about (rank + 1)^-exponent, of uniform numbers."""
    ends = np.asarray(sizes, dtype=np.float64) + 1
    if abs(exponent - 1) < 1e-6:
        places = ends**uniform
    else:
        power = 1 - exponent
        places = (1 + uniform * (ends**power - 1)) ** (1 / power)
    return np.asarray(np.minimum(places.astype(np.int64), sizes) - 1)


def _exponential(
    random: np.random.Generator, shape: int | tuple[int, int], *, mean: float
) -> Integers:
    return (-np.log1p(-random.random(shape)) * mean).astype(np.int64)


def _hash(settings: SyntheticSettings, one: Integers, other: Integers) -> NDArray[np.uint64]:
    """Mix two integers and the seed into 64 random bits (the finaliser of SplitMix64)."""
    bits = one.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits += other.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    bits += np.uint64(settings.seed % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))


def titles(settings: SyntheticSettings) -> Iterator[tuple[list[int], list[str]]]:
    """Ids of all items and their titles, in parts, popular items first; no title occurs twice.

    >>> ids, named = next(titles(SyntheticSettings(items=400)))
    >>> len({*named}), named[0], named[4], named[1]
    (400, 'Amber attic basket', 'Antique attic basket', 'Amber balcony bench')
    """
    kinds = len(_PLACES) * len(_THINGS)
    rounds = 1 + (settings.items - 1) // settings.clusters // len(_ADJECTIVES)  # within a cluster
    for begin in range(0, settings.items, _AT_ONCE):
        ranks = np.arange(begin, min(begin + _AT_ONCE, settings.items))
        places, clusters = np.divmod(ranks, settings.clusters)
        names = [
            _title(cluster % kinds, place % len(_ADJECTIVES), number)
            for cluster, place, number in zip(
                clusters.tolist(),
                places.tolist(),
                (places // len(_ADJECTIVES) + clusters // kinds * rounds).tolist(),
                strict=True,
            )
        ]
        yield item_ids(settings, ranks).tolist(), names


def _title(kind: int, look: int, number: int) -> str:
    turn, place = divmod(kind, len(_PLACES))
    where, what = _PLACES[place], _THINGS[(place + turn) % len(_THINGS)]
    return f"{_ADJECTIVES[look]} {where} {what}" + (f" {number + 1}" if number else "")
