"""Finding items by a part of their title or id."""

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from sce.data.vocabulary import Vocabulary

_AT_ONCE = 1 << 16  # items, while the text is made
_FEW = 1 << 12  # matches, of which all are compared
_PIECE = 1 << 20  # bytes
_LINE, _ID = "\n", "\t"  # begin an item, and its id
_SPACES = dict.fromkeys((*range(32), 127), " ")


class Search:
    """One text of all titles and ids, a line each, in which is searched from its beginning.

    >>> titles = Vocabulary.from_strings(["Ash", "Red ash"])
    >>> search = Search(Vocabulary.from_integers([7, 42]), titles)
    >>> search.find("ash", 10), search.find("4", 10), search.find("", 1)
    ([0, 1], [1], [0])
    """

    def __init__(self, item_ids: Vocabulary, titles: Vocabulary | None = None) -> None:
        self.n_items = len(item_ids)
        parts = []
        for begin in range(0, self.n_items, _AT_ONCE):
            codes = range(begin, min(begin + _AT_ONCE, self.n_items))
            named = titles.decode(codes) if titles is not None else [""] * len(codes)
            pairs = zip(named, item_ids.decode(codes), strict=True)
            lines = (f"{_LINE}{_plain(title)}{_ID}{_plain(item)}" for title, item in pairs)
            parts.append("".join(lines).encode(errors="replace"))
        self._text = b"".join(parts)
        begins = np.flatnonzero(np.frombuffer(self._text, np.uint8) == ord(_LINE))
        self._begins = np.append(begins, len(self._text))

    def find(self, query: str, k: int) -> list[int]:
        """Catalogue indices of the first k items that match, without regard to case.

        Titles that begin with the query come first, then ids, then titles and ids of which a word
        does, then all others that have it inside.
        """
        given, query = query, _plain(query).strip()
        if not query:  # control characters alone are in no item
            return [] if given.strip(" ") else list(range(min(k, self.n_items)))
        patterns = [(before + query).encode(errors="replace") for before in (_LINE, _ID, " ", "")]
        some = [*islice(self._matches(patterns[-1]), _FEW)]
        if len(some) < _FEW:  # these are all: one search will do
            lines = (self._text[self._begins[c] : self._begins[c + 1]] for c in some)
            ranks = [next(n for n, one in enumerate(patterns) if one in line) for line in lines]
            return [code for _, code in sorted(zip(ranks, some, strict=True))][:k]
        each = chain.from_iterable(map(self._matches, patterns))
        found: dict[int, None] = {}
        while len(found) < k and (code := next(each, None)) is not None:
            found[code] = None
        return list(found)

    def _matches(self, pattern: bytes) -> Iterator[int]:
        begin, end = 0, len(self._text)
        while begin < end:
            # In pieces: the search keeps all other threads waiting.
            place = self._text.find(pattern, begin, begin + _PIECE + len(pattern) - 1)
            if place < 0:
                begin += _PIECE
                continue
            code = int(np.searchsorted(self._begins, place, side="right")) - 1
            yield code
            begin = int(self._begins[code + 1])


def _plain(text: int | str) -> str:
    return str(text).translate(_SPACES).casefold()
