"""Titles for synthetic items: a cluster is one kind of thing, so that what follows looks alike."""

from collections.abc import Iterator

import numpy as np

from sce.data.synthetic import SyntheticSettings, item_ids

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
