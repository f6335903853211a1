"""The ids of users or items, sorted; an id's position in the vocabulary is its code.

Integers lie in one int64 array. Strings lie end to end as UTF-8 in one byte array, with the offset
at which each begins, so that a vocabulary of any size is memory-mapped and searched where it lies:
nothing is ever built that holds all of its ids as Python objects. UTF-8 sorts by bytes exactly as
Python sorts strings by code point.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Kind: TypeAlias = Literal["integer", "string"]

# Strings are compared eight bytes at a time, as one big-endian number; eight zero bytes behind the
# last string keep every such read inside the array, also when the array is a read-only file.
_WORD = 8
# More than one query for so many ids: a pass over all ids is cheaper than searching each query.
_FEW = 32
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class Vocabulary:
    """Distinct ids in ascending order.

    Make one with `from_integers`, `from_strings` or `from_arrays`.

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
        return cls("string", np.frombuffer(text + bytes(_WORD), np.uint8), offsets)

    @classmethod
    def from_arrays(cls, kind: Kind, arrays: Mapping[str, NDArray[Any]]) -> "Vocabulary":
        """Wrap what `arrays` gave, without copying it: memory-mapped arrays stay on disk.

        Raises:
            ValueError: when the arrays cannot be those of a vocabulary of this kind.
        """
        expected = {"integer": {"values"}, "string": {"values", "offsets"}}
        if expected.get(kind) != set(arrays):
            raise ValueError(f"no vocabulary: kind {kind!r} with arrays {sorted(arrays)}")
        values, offsets = arrays["values"], arrays.get("offsets")
        if kind == "integer":
            sound = values.dtype == np.int64 and values.ndim == 1
        else:
            assert offsets is not None
            sound = (
                values.dtype == np.uint8
                and offsets.dtype == np.int64
                and values.ndim == offsets.ndim == 1
                and len(offsets) > 0
                and int(offsets[0]) == 0
                and int(offsets[-1]) + _WORD == len(values)
            )
        if not sound:
            raise ValueError(f"no {kind} vocabulary: the arrays' types or lengths do not fit")
        return cls(kind, values, offsets)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that hold everything, to be saved: the opposite of `from_arrays`."""
        if self.offsets is None:
            return {"values": self.values}
        return {"values": self.values, "offsets": self.offsets}

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, code: int) -> int | str:
        # A negative code is the -1 of `lookup`, never "from the end".
        if not 0 <= code < len(self):
            raise IndexError(f"code {code} of a vocabulary of {len(self)} ids")
        return int(self.values[code]) if self.offsets is None else self._bytes(code).decode()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        mine, theirs = self.arrays(), other.arrays()
        return self.kind == other.kind and all(np.array_equal(mine[k], theirs[k]) for k in mine)

    __hash__ = None  # type: ignore[assignment]  # compared by content, which may be gigabytes

    def __repr__(self) -> str:
        return f"Vocabulary({self.kind}, {len(self)} ids)"

    def decode(self, codes: NDArray[np.integer[Any]] | Sequence[int]) -> list[int | str]:
        """The ids of these codes, in their order."""
        chosen = self._checked(codes)
        if self.offsets is None:
            ids: list[int | str] = self.values[chosen].tolist()
            return ids
        text = self.values.data  # slices of a memoryview cost half of what an array's do
        begins, ends = self.offsets[chosen].tolist(), self.offsets[chosen + 1].tolist()
        return [str(text[b:e], "utf-8") for b, e in zip(begins, ends, strict=True)]

    def take(self, codes: NDArray[np.integer[Any]] | Sequence[int]) -> "Vocabulary":
        """The vocabulary of the ids at these strictly ascending codes."""
        chosen = self._checked(codes)
        if np.any(chosen[1:] <= chosen[:-1]):
            raise ValueError("codes must be strictly ascending")
        if self.offsets is None:
            return Vocabulary("integer", self.values[chosen])
        begins = self.offsets[chosen]
        offsets = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(self.offsets[chosen + 1] - begins, out=offsets[1:])
        # Where each byte comes from: its place in the new array, moved by its string's shift.
        source = np.arange(offsets[-1])
        source += np.repeat(begins - offsets[:-1], np.diff(offsets))
        values = np.zeros(len(source) + _WORD, np.uint8)
        values[: len(source)] = self.values[source]
        return Vocabulary("string", values, offsets)

    def lookup(self, ids: Sequence[int | str] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The codes of these ids, -1 where an id is unknown.

        Files often lose the difference between 5 and "5": an integer vocabulary finds "5", and a
        vocabulary of strings finds 5 as "5".
        """
        if self.kind == "integer":
            return self._lookup_integers(ids)
        listed = ids.tolist() if isinstance(ids, np.ndarray) else ids
        encoded = [
            i.encode(errors="surrogatepass") if isinstance(i, str) else b"%d" % i for i in listed
        ]
        # Neither sorted nor distinct, but laid out like a vocabulary.
        wanted = Vocabulary.from_sorted_text(b"".join(encoded), _lengths(encoded))
        assert wanted.offsets is not None
        return self._lookup_bytes(wanted.values, wanted.offsets)

    def _lookup_integers(
        self, ids: Sequence[int | str] | NDArray[np.integer[Any]]
    ) -> NDArray[np.int64]:
        if isinstance(ids, np.ndarray) and ids.dtype.kind == "i":
            wanted, possible = ids.astype(np.int64, copy=False), None
        else:
            numbers = [_as_int64(i) for i in (ids.tolist() if isinstance(ids, np.ndarray) else ids)]
            possible = np.array([n is not None for n in numbers], bool)
            wanted = np.array([n or 0 for n in numbers], np.int64)
        if not len(self):
            return np.full(len(wanted), -1, np.int64)
        codes = np.searchsorted(self.values, wanted)
        found = self.values[np.minimum(codes, len(self) - 1)] == wanted
        if possible is not None:
            found &= possible
        return np.where(found, codes, -1)

    def _lookup_bytes(
        self, values: NDArray[np.uint8], offsets: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Binary search of all strings at once: each round halves every string's range."""
        count = len(offsets) - 1
        low = np.zeros(count, np.int64)
        high = np.full(count, len(self), np.int64)
        if count * _FEW >= len(self) > 0:
            low, high = self._narrow(values, offsets)
        found = np.full(count, -1, np.int64)
        searching = np.flatnonzero(low < high)
        while len(searching):
            middle = (low[searching] + high[searching]) // 2
            order = self._compare(middle, values, offsets, searching)
            found[searching[order == 0]] = middle[order == 0]
            low[searching[order < 0]] = middle[order < 0] + 1
            high[searching[order > 0]] = middle[order > 0]
            searching = searching[(order != 0) & (low[searching] < high[searching])]
        return found

    def _narrow(
        self, values: NDArray[np.uint8], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For many strings: the codes between which each can lie, by one word of every id.

        That word follows the prefix that all ids share. A string without the prefix may be sent
        anywhere: the search then does not find it, as it should not.
        """
        assert self.offsets is not None
        first, last = self._bytes(0), self._bytes(len(self) - 1)
        shared = 0
        while shared < min(len(first), len(last)) and first[shared] == last[shared]:
            shared += 1
        words, wanted = (
            _words(flat, np.minimum(ends[:-1] + shared, ends[1:]), ends[1:])
            for flat, ends in ((self.values, self.offsets), (values, offsets))
        )
        return np.searchsorted(words, wanted), np.searchsorted(words, wanted, side="right")

    def _compare(
        self,
        codes: NDArray[np.int64],
        values: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        queries: NDArray[np.int64],
    ) -> NDArray[np.int8]:
        """-1, 0 or 1: the string at each code against its query among other strings."""
        assert self.offsets is not None
        mine, my_end = self.offsets[codes], self.offsets[codes + 1]
        other, other_end = offsets[queries], offsets[queries + 1]
        # When every word is equal, the shorter string is the prefix of the longer: it comes first.
        order = np.sign((my_end - mine) - (other_end - other)).astype(np.int8)
        tied = np.arange(len(codes))
        while len(tied):
            left = _words(self.values, mine[tied], my_end[tied])
            right = _words(values, other[tied], other_end[tied])
            order[tied[left < right]] = -1
            order[tied[left > right]] = 1
            mine[tied] += _WORD
            other[tied] += _WORD
            more = (left == right) & ((mine < my_end)[tied] & (other < other_end)[tied])
            tied = tied[more]
        return order

    def _bytes(self, code: int) -> bytes:
        assert self.offsets is not None
        return self.values[self.offsets[code] : self.offsets[code + 1]].tobytes()

    def _checked(self, codes: NDArray[np.integer[Any]] | Sequence[int]) -> NDArray[np.int64]:
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
    """The eight bytes at each beginning as a big-endian number, zero from the string's end on."""
    at_every_byte = np.ndarray((len(values) - _WORD + 1,), ">u8", buffer=values, strides=(1,))
    words = at_every_byte[begins].astype(np.uint64)
    missing = np.maximum(_WORD - (ends - begins), 0).astype(np.uint64) * np.uint64(8)
    # A shift by all 64 bits is undefined: an empty rest is zero by itself.
    return np.where(missing == 64, np.uint64(0), words >> missing << missing)


def _as_int64(given: int | str) -> int | None:
    """The integer that an id stands for, when it is written as integers are."""
    if isinstance(given, str):
        try:
            number = int(given)
        except ValueError:
            return None
        if str(number) != given:
            return None
    else:
        number = int(given)
    return number if _INT64.min <= number <= _INT64.max else None
