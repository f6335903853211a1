"""Finding items by a part of their title or id."""

from collections.abc import Iterator

import numpy as np

from sce.data.vocabulary import Vocabulary

_AT_ONCE = 1 << 16  # items, while the text is made
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
        self._begins = np.flatnonzero(np.frombuffer(self._text, np.uint8) == ord(_LINE))

    def find(self, query: str, k: int) -> list[int]:
        """Catalogue indices of the first k items that match, without regard to case.

        Titles that begin with the query come first, then ids, then titles and ids of which a word
        does, then all others that have it inside.
        """
        query = _plain(query).strip()
        if not query:
            return list(range(min(k, self.n_items)))
        found: dict[int, None] = {}
        for before in (_LINE, _ID, " ", ""):
            for code in self._matches((before + query).encode(errors="replace")):
                found[code] = None
                if len(found) == k:
                    return list(found)
        return list(found)

    def _matches(self, pattern: bytes) -> Iterator[int]:
        place = self._text.find(pattern)
        while place >= 0:
            code = int(np.searchsorted(self._begins, place, side="right")) - 1
            yield code
            end = self._begins[code + 1] if code + 1 < self.n_items else len(self._text)
            place = self._text.find(pattern, int(end))


def _plain(text: int | str) -> str:
    return str(text).translate(_SPACES).casefold()
