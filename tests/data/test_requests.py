from hypothesis import given
from hypothesis import strategies as st

from sce.data.requests import Request, list_request, look_up
from sce.data.vocabulary import Vocabulary

KNOWN = range(5)
IDS = st.lists(st.integers(0, 9), max_size=4)
REQUESTS = st.builds(
    lambda history, allow, block, timed: Request(
        history,
        allow=allow,
        block=block,
        times=[7 + n for n in range(len(history))] * timed or None,
    ),
    IDS,
    st.none() | IDS,
    st.none() | IDS,
    st.booleans(),
)


@given(st.lists(REQUESTS, max_size=5))
def test_each_request_has_its_own_codes_and_unknown_ids(requests: list[Request]) -> None:
    listed = [list_request(one) for one in requests]
    read = look_up(Vocabulary.from_integers(KNOWN), requests, listed)
    for one, (history, allow, block), found in zip(requests, listed, read, strict=True):
        assert found.history.tolist() == [item for item in history if item in KNOWN]
        assert found.unknown == tuple(item for item in history if item not in KNOWN)
        assert (found.allow is None) == (one.allow is None)
        if found.allow is not None:
            assert found.allow.tolist() == [item for item in allow if item in KNOWN]
        assert found.block.tolist() == [item for item in block if item in KNOWN]
        assert found.unlisted == tuple(item for item in [*allow, *block] if item not in KNOWN)
        if one.times is not None:
            assert found.times is not None
            assert found.times.tolist() == [n for n, item in enumerate(history) if item in KNOWN]
