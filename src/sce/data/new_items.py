"""New items for a catalogue, without training: by similar items, or by content vectors.

Of the items that have both a content vector and a row in the table, a linear map from the one to
the other is learned by ridge regression; it gives new items their rows.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sce.data.items import Items
from sce.data.lines import parse_line, read_lines
from sce.data.vocabulary import Vocabulary, as_int64
from sce.errors import InputError, show_value
from sce.units import plural

LEAST_VECTORS = 20  # of items of the catalogue, to learn a map from
_FOLDS = 5  # one to measure by, the others to choose the penalty with
_PENALTIES = [10.0**exponent for exponent in range(-4, 4)]  # in units of a content vector's spread
_LARGEST = 1e9  # in a content vector: of much larger ones products overflow
_LINES_AT_ONCE = 1 << 10
_IDS = (int, str)
_MEMBERS = {"item_id", "similar_to", "vector", "title"}
_EXPECTED = '{"item_id": ..., "similar_to": [ids]} or {"item_id": ..., "vector": [numbers]}'

Matrix = NDArray[np.float64]


@dataclass
class NewItems:
    """What a file says of new items, and of items that are there."""

    similar: dict[int | str, NDArray[np.int64]] = field(default_factory=dict)  # rows, by new id
    vectors: dict[int | str, NDArray[np.float64]] = field(default_factory=dict)  # by new id
    content: dict[int, NDArray[np.float64]] = field(default_factory=dict)  # by row
    titles: dict[int | str, str] = field(default_factory=dict)  # by id, new or not


class Grown(NamedTuple):
    """A catalogue with new items."""

    items: Items
    sources: NDArray[np.int64]  # by item, its index before, -1 of a new one
    rows: NDArray[np.float32]  # of the new ones in turn
    added: dict[str, Any]  # see `grow`


def grow(items: Items, table: NDArray[np.float32], path: Path) -> Grown:
    """Add the new items of a file to a catalogue and its table.

    Returns:
        Them, and how many were "added" by "similar" items and by "content", from how many
        "vectors", and the held-out "error" of the map: 1 is no better than the mean item.
    """
    found, error = read_new_items(path, items.ids), None
    rows = {one: table[codes].mean(0, np.float64) for one, codes in found.similar.items()}
    if found.vectors:
        known = table[list(found.content)].astype(np.float64)
        try:
            weights, error = fit_map(np.stack(list(found.content.values())), known)
        except np.linalg.LinAlgError as fault:
            raise InputError(f"no map can be learned from the vectors of {path}: {fault}") from None
        mapped = with_ones(np.stack(list(found.vectors.values()))) @ weights
        rows |= dict(zip(found.vectors, mapped, strict=True))
    grown, sources = items.insert(list(rows), found.titles)
    new = [rows[one] for one in grown.ids.decode(np.flatnonzero(sources < 0))]
    added: dict[str, Any] = {"similar": len(found.similar), "content": len(found.vectors)}
    added |= {"vectors": len(found.content), "error": error}
    return Grown(grown, sources, np.stack(new).astype(np.float32), added)


def tell_added(added: Mapping[str, Any]) -> str:
    """How many items were added by which way."""
    ways = {"similar": "by similar items", "content": "by content vectors"}
    return ", ".join(f"{added[way]:,} {words}" for way, words in ways.items() if added[way])


def read_new_items(path: Path, known: Vocabulary) -> NewItems:
    """Read a file of new items, and content vectors of known ones; an error names the line."""
    found, seen, width = NewItems(), set(), None
    for number, record, codes in _records(path, known):
        try:
            item = _as_id(record["item_id"], known)
            if item in seen:
                raise ValueError(f"item {item!r} is there twice")
            seen.add(item)
            code = codes[record["item_id"]]
            if title := _title(record.get("title")):
                found.titles[item] = title
            if "similar_to" in record:
                if code >= 0:
                    raise ValueError(f"item {item!r} is in the catalogue already")
                found.similar[item] = _similar(record["similar_to"], known, codes)
                continue
            vector = _vector(record["vector"])
            if len(vector) != (width := width or len(vector)):
                raise ValueError(f"a vector of {len(vector)} numbers, and others have {width}")
            if code >= 0:
                found.content[code] = vector
            else:
                found.vectors[item] = vector
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
    if not found.similar and not found.vectors:
        raise InputError(f"{path} has no new item; give lines such as {_EXPECTED}")
    if found.vectors and len(found.content) < LEAST_VECTORS:
        raise InputError(
            f"{path} has content vectors of {plural(len(found.content), 'item')} of the catalogue, "
            f"and at least {LEAST_VECTORS} are needed to learn what a vector means; add their "
            "lines, or name similar items"
        )
    return found


def fit_map(content: Matrix, rows: Matrix) -> tuple[Matrix, float]:
    """Learn a linear map [p + 1] to [d] by ridge regression, of vectors `with_ones`.

    The penalty is chosen on four fifths of the items, by cross-validation; the error is that of the
    remaining fifth. Then all are learned from. Sums of products are all that is needed of a fold.
    """
    sums: list[Any] = []
    for part in np.array_split(np.random.default_rng(0).permutation(len(content)), _FOLDS):
        one, other = with_ones(content[part]), rows[part]
        sums.append((one.T @ one, one.T @ other, float((other**2).sum())))

    def solve(folds: Iterable[int], penalty: float) -> Matrix:
        gram, products = (sum(sums[n][which] for n in folds) for which in (0, 1))
        size = gram[-1, -1]
        spread = (np.diag(gram)[:-1] / size - (gram[-1, :-1] / size) ** 2).mean()
        ridge = np.full(len(gram), penalty * size * max(float(spread), 1e-30))
        ridge[-1] = 0.0  # what is added to all costs nothing
        solved: Matrix = np.linalg.solve(gram + np.diag(ridge), products)
        return solved

    def error(fold: int, weights: Matrix) -> float:
        """The sum of squares that a map leaves."""
        gram, products, squares = sums[fold]
        return float(squares + (weights * (gram @ weights - 2 * products)).sum())

    others = range(1, _FOLDS)
    penalty = min(
        _PENALTIES, key=lambda p: sum(error(n, solve({*others} - {n}, p)) for n in others)
    )
    mean = np.zeros_like(sums[0][1])
    mean[-1] = sum(sums[n][1][-1] for n in others) / sum(sums[n][0][-1, -1] for n in others)
    spread = error(0, mean)
    left = error(0, solve(others, penalty)) / spread if spread > 0 else 1.0
    return solve(range(_FOLDS), penalty), max(0.0, left)


def with_ones(content: Matrix) -> Matrix:
    """Content vectors with a 1 at the end of each, whose weights are added."""
    return np.hstack([content, np.ones((len(content), 1))])


def _records(
    path: Path, known: Vocabulary
) -> Iterator[tuple[int, dict[str, Any], dict[int | str, int]]]:
    """Number and content of every line that is not blank, and the codes of all ids in it.

    Many lines are looked up together: one by one, a search among a million ids takes a millisecond.
    """
    lines = read_lines(path)
    while some := [*islice(lines, _LINES_AT_ONCE)]:
        records = [(number, _parse(path, number, line)) for number, line in some]
        ids = {record["item_id"] for _, record in records if type(record["item_id"]) in _IDS}
        for _, record in records:
            if isinstance(similar := record.get("similar_to"), list):
                ids |= {one for one in similar if type(one) in _IDS}
        codes = dict(zip(ids, known.lookup([*ids]).tolist(), strict=True))
        yield from ((number, record, codes) for number, record in records)


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = parse_line(line, _MEMBERS)
        keys = record.keys() if isinstance(record, dict) else set()
        if "item_id" not in keys or len(keys & {"similar_to", "vector"}) != 1:
            raise ValueError(f"expected {_EXPECTED}, got {show_value(record)}")
    except ValueError as error:
        raise InputError(f"{path}, line {number}: {error}") from error
    return dict(record)


def _as_id(given: Any, known: Vocabulary) -> int | str:
    """An id as the vocabulary has it."""
    if type(given) not in _IDS or given == "":
        raise ValueError(f"ids are integers or strings, got {show_value(given)}")
    if known.kind == "string":
        str(given).encode()  # half a surrogate pair could be read, but not written
        return str(given)
    number = as_int64(given)
    if number is None:
        raise ValueError(f"ids of the catalogue are integers of 64 bits, got {show_value(given)}")
    return number


def _similar(given: Any, known: Vocabulary, codes: Mapping[int | str, int]) -> NDArray[np.int64]:
    if not isinstance(given, list) or not given:
        raise ValueError(f"similar_to is a list of ids, got {show_value(given)}")
    for one in given:
        _as_id(one, known)  # refuses what is none
    if unknown := [one for one in given if codes[one] < 0]:
        shown = ", ".join(map(show_value, unknown[:3])) + " ..." * (len(unknown) > 3)
        raise ValueError(f"similar_to names what is not in the catalogue: {shown}")
    return np.array([codes[one] for one in given], np.int64)


def _title(given: Any) -> str:
    """A title, empty if there is none."""
    if not isinstance(given, str | None):
        raise ValueError(f"a title is a text, got {show_value(given)}")
    title = (given or "").strip()
    title.encode()  # half a surrogate pair could be read, but not written
    return title


def _vector(given: Any) -> NDArray[np.float64]:
    if not isinstance(given, list) or not given or {*map(type, given)} - {int, float}:
        raise ValueError(f"a vector is a list of numbers, got {show_value(given)}")
    vector = np.array([float(one) for one in given])
    if not (np.abs(vector) <= _LARGEST).all():
        raise ValueError(f"a vector has a number that is not finite, or beyond {_LARGEST:.0e}")
    return vector
