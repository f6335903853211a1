"""The ids of users or items, sorted; an id's position in the vocabulary is its code.

Integers lie in one int64 array. Strings lie end to end as UTF-8 in one byte array, with the offset
at which each begins, so that a vocabulary of any size is memory-mapped and searched where it lies:
nothing is ever built that holds all of its ids as Python objects. UTF-8 sorts by bytes exactly as
Python sorts strings by code point.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sce.errors import InputError
from sce.memory import require_memory

Kind: TypeAlias = Literal["integer", "string"]

# Strings are compared eight bytes at a time, as one big-endian number; eight zero bytes behind the
# last string keep every such read inside the array, also when the array is a read-only file.
WORD = 8
_INT64 = np.iinfo(np.int64)
_IDS_AT_ONCE = 1 << 16  # as Python objects
_STRIDE = 64  # strings of which the first is searched for among all
_NEAR = 2000  # ids on either side that are compared, in a tenth of a second


@dataclass(frozen=True, eq=False, repr=False)
class Vocabulary:
    """Distinct ids in ascending order; made by the `from_` methods.

    >>> ids = Vocabulary.from_strings(["pear", "apple", "pear"])
    >>> len(ids), ids[0], ids.decode([1, 0])
    (2, 'apple', ['pear', 'apple'])
    >>> ids.lookup(["pear", "plum"]).tolist()
    [1, -1]
    """

    kind: Kind
    values: NDArray[Any]  # int64 ids; or the UTF-8 bytes of all strings, then eight zeros (uint8)
    offsets: NDArray[np.int64] | None = None  # strings only: string i is values[offsets[i:i + 2]]

    @classmethod
    def from_integers(cls, ids: Iterable[int] | NDArray[np.integer[Any]]) -> "Vocabulary":
        """Sort integers, each kept once."""
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"integer ids expected, got an array of {array.dtype}")
        if array.size and int(array.max()) > _INT64.max:
            raise OverflowError(f"id {array.max()} does not fit 64 bits with a sign")
        array = array.astype(np.int64)
        if np.any(array[1:] <= array[:-1]):
            array = np.unique(array)
        return cls("integer", array)

    @classmethod
    def from_strings(cls, ids: Iterable[str]) -> "Vocabulary":
        """Sort strings, each kept once."""
        encoded = [text.encode() for text in sorted(set(ids))]
        return cls.from_sorted_text(b"".join(encoded), _lengths(encoded))

    @classmethod
    def from_sorted_text(cls, text: bytes, lengths: NDArray[np.integer[Any]]) -> "Vocabulary":
        """Wrap distinct strings, sorted and joined as UTF-8, with the length of each in bytes."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls("string", np.frombuffer(text + bytes(WORD), np.uint8), offsets)

    @classmethod
    def from_arrays(
        cls, kind: Kind, arrays: Mapping[str, NDArray[Any]], prefix: str = ""
    ) -> "Vocabulary":
        """Wrap what `arrays` gave, without a copy; ValueError for what it cannot have given."""
        arrays = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
        types = {"values": "int64" if kind == "integer" else "uint8"}
        if kind == "string":
            types["offsets"] = "int64"
        found = {name: str(array.dtype) for name, array in arrays.items() if array.ndim == 1}
        if found != types:
            raise ValueError(f"no vocabulary of kind {kind!r}: {found} instead of {types}")
        values, offsets = arrays["values"], arrays.get("offsets")
        if offsets is not None and [*offsets[:1], *offsets[-1:]] != [0, len(values) - WORD]:
            raise ValueError("no vocabulary of kind 'string': offsets and values do not fit")
        return cls(kind, values, offsets)

    def check(self, *, titles: bool = False) -> None:
        """Refuse, with ValueError, ids that do not ascend, and strings that overlap.

        `titles` may have any order. A million strings take half a second, twice what their hash
        takes; out of order, some of them would not be found.
        """
        if self.offsets is not None and np.any(self.offsets[1:] < self.offsets[:-1]):
            raise ValueError("offsets of ids must ascend")
        for first in () if titles else range(0, len(self) - 1, _IDS_AT_ONCE):
            some = np.arange(first, min(first + _IDS_AT_ONCE, len(self) - 1))
            if self.offsets is None:
                ascends = self.values[some] < self.values[some + 1]
            else:
                ascends = self._compare(some, self, some + 1) < 0
            if not ascends.all():
                raise ValueError("ids must ascend")

    def arrays(self, prefix: str = "") -> dict[str, NDArray[Any]]:
        """Arrays to save, for `from_arrays`; their names begin with the prefix."""
        values = {f"{prefix}values": self.values}
        return values if self.offsets is None else values | {f"{prefix}offsets": self.offsets}

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, code: int) -> int | str:
        return self.decode([code])[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        mine, theirs = self.arrays(), other.arrays()
        return self.kind == other.kind and all(np.array_equal(mine[k], theirs[k]) for k in mine)

    __hash__ = None  # type: ignore[assignment]  # compared by content, which may be gigabytes

    def __repr__(self) -> str:
        return f"Vocabulary({self.kind}, {len(self)} ids)"

    def decode(self, codes: NDArray[np.integer[Any]] | Sequence[int]) -> list[int | str]:
        """Ids of codes, in their order."""
        chosen = self._checked(codes)
        if self.offsets is None:
            ids: list[int | str] = self.values[chosen].tolist()
            return ids
        text = self.values.data  # slices of a memoryview cost half of what an array's do
        begins, ends = self.offsets[chosen].tolist(), self.offsets[chosen + 1].tolist()
        try:
            return [str(text[b:e], "utf-8") for b, e in zip(begins, ends, strict=True)]
        except UnicodeDecodeError as error:
            raise InputError(f"the ids were altered: one of them is not UTF-8 ({error})") from error

    def take(self, codes: NDArray[np.integer[Any]] | Sequence[int]) -> "Vocabulary":
        """Vocabulary of the ids at strictly ascending codes."""
        chosen = self._checked(codes)
        if np.any(chosen[1:] <= chosen[:-1]):
            raise ValueError("codes must be strictly ascending")
        if self.offsets is None:
            return Vocabulary("integer", self.values[chosen])
        ids = f"choosing {len(chosen):,} of {len(self):,} ids"
        require_memory(4 * self.values.nbytes + self.offsets.nbytes, ids)
        lengths = np.diff(self.offsets)
        kept = np.zeros(len(self), bool)
        kept[chosen] = True
        values = self.values[:-WORD][np.repeat(kept, lengths)]
        return Vocabulary.from_sorted_text(values.tobytes(), lengths[chosen])

    def lookup(self, ids: Sequence[int | str] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Codes of ids, -1 where an id is unknown.

        Files often lose the difference between 5 and "5": an integer vocabulary finds "5", and a
        vocabulary of strings finds 5 as "5".
        """
        listed = ids.tolist() if isinstance(ids, np.ndarray) else ids
        if self.kind == "string":
            return self._search(listed)[0]
        try:  # most often they are integers already, and none is too large
            wanted, found = np.array(listed, np.int64), np.ones(len(listed), bool)
            if {*map(type, listed)} - {int}:
                raise ValueError
        except (OverflowError, ValueError):
            numbers = [as_int64(given) for given in listed]
            wanted = np.array([number or 0 for number in numbers], np.int64)
            found = np.array([number is not None for number in numbers], bool)
        codes = np.searchsorted(self.values, wanted)
        found &= codes < len(self)
        found[found] = self.values[codes[found]] == wanted[found]
        return np.where(found, codes, -1)

    def lookup_all(self, other: "Vocabulary") -> NDArray[np.int64]:
        """Codes of all ids of another vocabulary, -1 where one is not in this."""
        found, strings = np.empty(len(other), np.int64), self.kind == other.kind == "string"
        for first in range(0, len(other), _IDS_AT_ONCE):
            some = np.arange(first, min(first + _IDS_AT_ONCE, len(other)))
            found[some] = self._merge(other, some) if strings else self.lookup(other.decode(some))
        return found

    def spread(
        self, codes: NDArray[np.int64], others: Mapping[int, str] | None = None
    ) -> "Vocabulary":
        """The strings at codes; empty where a code is -1.

        At the places that `others` has, its strings are instead.
        """
        assert self.offsets is not None
        given, text, joined = others or {}, self.values.data, bytearray()
        lengths = np.zeros(len(codes), np.int64)
        for first in range(0, len(codes), _IDS_AT_ONCE):
            some = codes[first : first + _IDS_AT_ONCE]
            # At -1 the end of all text and its beginning: nothing is between.
            spans = zip(self.offsets[some].tolist(), self.offsets[some + 1].tolist(), strict=True)
            parts = [
                given[place].encode() if place in given else bytes(text[begin:end])
                for place, (begin, end) in enumerate(spans, first)
            ]
            joined += b"".join(parts)
            lengths[first : first + len(some)] = _lengths(parts)
        return Vocabulary.from_sorted_text(bytes(joined), lengths)

    def as_strings(self) -> "Vocabulary":
        """The ids as strings, whose order, and so their codes, may be another."""
        if self.kind == "string":
            return self
        return Vocabulary.from_strings(map(str, self.values.tolist()))

    def insert(self, ids: Sequence[int | str]) -> tuple["Vocabulary", NDArray[np.int64]]:
        """A vocabulary with other ids too, and of each of its ids the code here, -1 if it is new.

        >>> ids, codes = Vocabulary.from_integers([3, 9]).insert([12, 5])
        >>> ids.decode(range(4)), codes.tolist()
        ([3, 5, 9, 12], [0, -1, 1, -1])
        """
        if self.offsets is None:
            added = np.sort(np.array(ids, np.int64))
            places = np.searchsorted(self.values, added)
            united = Vocabulary("integer", np.insert(self.values, places, added))
        else:
            new = Vocabulary.from_strings(map(str, ids))
            assert new.offsets is not None
            places, sizes = self._search(new.decode(range(len(new))))[1], np.diff(new.offsets)
            text = np.insert(
                self.values[:-WORD], np.repeat(self.offsets[places], sizes), new.values[:-WORD]
            )
            lengths = np.insert(np.diff(self.offsets), places, sizes)
            united = Vocabulary.from_sorted_text(text.tobytes(), lengths)
        return united, np.insert(np.arange(len(self)), places, -1)

    def closest(self, given: int | str, most: int = 3) -> list[int | str]:
        """Ids that are written much like another, the best first; else its neighbours in order.

        Of many ids, only those that begin like it are compared: its neighbours.

        >>> Vocabulary.from_strings(["apple", "pear", "plum"]).closest("aple", 1)
        ['apple']
        """
        if self.kind == "integer":
            place = bisect_left(self, as_int64(given) or 0)
        else:
            place = bisect_left(self, str(given))
            near = self.decode(range(max(0, place - _NEAR), min(len(self), place + _NEAR)))
            if alike := get_close_matches(str(given), map(str, near), most):
                return [*alike]
        first = max(0, min(place - most // 2, len(self) - most))
        return self.decode(range(first, min(first + most, len(self))))

    def _search(self, ids: Sequence[int | str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Binary search of all strings at once: each round halves every string's range.

        Returns:
            Their codes, -1 where one is unknown, and the codes that these would have.
        """
        try:
            encoded = [
                i.encode(errors="surrogatepass") if isinstance(i, str) else b"%d" % i for i in ids
            ]
        except ValueError as error:  # of Python
            raise InputError(
                "an id is an integer of thousands of digits; give it as text"
            ) from error
        # Neither sorted nor distinct, but laid out like a vocabulary.
        wanted = Vocabulary.from_sorted_text(b"".join(encoded), _lengths(encoded))
        ends = np.zeros(len(ids), np.int64), np.full(len(ids), len(self))
        return self._narrow(wanted, np.arange(len(ids)), *ends)

    def _merge(self, other: "Vocabulary", queries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Codes of ascending strings of another vocabulary: every 64th gives bounds to others."""
        some = queries[::_STRIDE]
        found, low = self._narrow(other, some, np.zeros_like(some), np.full_like(some, len(self)))
        places = np.append(np.where(found >= 0, found, low), len(self))
        # The last string of a stretch comes before the first of the next.
        low, high = (np.repeat(ends, _STRIDE)[: len(queries)] for ends in (places[:-1], places[1:]))
        return self._narrow(other, queries, low, high)[0]

    def _narrow(
        self,
        wanted: "Vocabulary",
        queries: NDArray[np.int64],
        low: NDArray[np.int64],
        high: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `_search`, for strings of another vocabulary, each between two codes."""
        found = np.full(len(queries), -1)
        searching = np.flatnonzero(low < high)
        while len(searching):
            middle = (low[searching] + high[searching]) // 2
            order = self._compare(middle, wanted, queries[searching])
            found[searching[order == 0]] = middle[order == 0]
            low[searching[order < 0]] = middle[order < 0] + 1
            high[searching[order > 0]] = middle[order > 0]
            searching = searching[(order != 0) & (low[searching] < high[searching])]
        return found, low

    def _compare(
        self, codes: NDArray[np.int64], other: "Vocabulary", queries: NDArray[np.int64]
    ) -> NDArray[np.int8]:
        """-1, 0 or 1: the string at each code against its query among other strings."""
        assert self.offsets is not None
        assert other.offsets is not None
        begins, ends = self.offsets[codes], self.offsets[codes + 1]
        other_begins, other_ends = other.offsets[queries], other.offsets[queries + 1]
        # When every word is equal, the shorter string is the prefix of the longer: it comes first.
        order = np.sign((ends - begins) - (other_ends - other_begins)).astype(np.int8)
        tied = np.arange(len(codes))
        while len(tied):
            left = _words(self.values, begins[tied], ends[tied])
            right = _words(other.values, other_begins[tied], other_ends[tied])
            order[tied[left < right]] = -1
            order[tied[left > right]] = 1
            begins += WORD
            other_begins += WORD
            more = (left == right) & ((begins < ends) & (other_begins < other_ends))[tied]
            tied = tied[more]
        return order

    def _checked(self, codes: NDArray[np.integer[Any]] | Sequence[int]) -> NDArray[np.int64]:
        """The codes as an array; a negative one is the -1 of `lookup`, never "from the end"."""
        chosen = np.asarray(codes, dtype=np.int64)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < len(self)):
            wrong = chosen[(chosen < 0) | (chosen >= len(self))][0]
            raise IndexError(f"code {wrong} of a vocabulary of {len(self)} ids")
        return chosen


def _lengths(encoded: Sequence[bytes]) -> NDArray[np.int64]:
    return np.fromiter(map(len, encoded), np.int64, len(encoded))


def _words(
    values: NDArray[np.uint8], begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Eight bytes from each beginning as a big-endian number, zero from the string's end on."""
    at_every_byte = np.ndarray((len(values) - WORD + 1,), ">u8", buffer=values, strides=(1,))
    words = at_every_byte[begins].astype(np.uint64)
    missing = np.maximum(WORD - (ends - begins), 0).astype(np.uint64) * np.uint64(8)
    # A shift by all 64 bits is undefined: an empty rest is zero by itself.
    return np.where(missing == 64, np.uint64(0), words >> missing << missing)


def as_int64(given: int | str) -> int | None:
    """An id as an integer, if it is one or is written as integers are."""
    try:
        number = int(given)
    except (ValueError, OverflowError):  # also nan and infinity, of a column of floats
        return None
    same = given == (str(number) if isinstance(given, str) else number)
    return number if same and _INT64.min <= number <= _INT64.max else None
