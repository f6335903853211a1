"""The interface of the server, in this process."""

import hmac
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from sce.cli.lists import offered
from sce.data.prepared import write_prepared
from sce.data.vocabulary import Vocabulary
from sce.serving.asking import Limits
from sce.serving.catalogue import Catalogue, Source
from sce.serving.engine import Request
from sce.serving.exported import add_items
from sce.serving.server import ServerSettings, Service
from tests.cycle_data import lay_out
from tests.serving.tiny_export import TITLED, make_engine, write_export

ENGINE = make_engine()
NOWHERE = Source(Path("nowhere"))


def make_service(**settings: Any) -> Service:
    return Service(NOWHERE, Catalogue.of(ENGINE), ServerSettings(**settings), print)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(make_service(limits=Limits(k=20, ids=10, requests=3, items=50)).app()) as made:
        yield made


def expected(history: list[Any], **options: Any) -> list[Any]:
    (found,) = ENGINE.recommend([Request(history, **options)])
    return [*zip(found.items, found.scores.tolist(), strict=True)]


def pairs(found: dict[str, Any]) -> list[Any]:
    return [(one["item"], one["score"]) for one in found["items"]]


def test_recommendations_are_those_of_the_engine_with_titles(client: TestClient) -> None:
    asked = {"history": [101, 7, "105"], "k": 4, "block": [110, 111], "keep_seen": True}
    found = client.post("/recommend", json=asked).json()
    assert pairs(found) == expected([101, 105], k=4, block=[110, 111], keep_seen=True)
    assert (found["known"], found["unknown"], found["version"]) == (2, [7], "one")
    for one in found["items"]:
        assert one.get("title", "") == TITLED[one["item"] - 100]
    allowed = client.post("/recommend", json={"history": [101], "allow": [103, 104, 101]}).json()
    assert {item for item, _ in pairs(allowed)} == {103, 104}
    assert len(pairs(client.post("/recommend", json={"history": [101]}).json())) == 10
    asked = {"history": [101, 1], "allow": [103, 9, "x"], "block": [8, 104]}
    found = client.post("/recommend", json=asked).json()
    assert (found["unknown"], found["ignored"]) == ([1], [9, "x", 8])


def test_users_of_the_log_are_asked_for_by_their_ids(tmp_path: Path) -> None:
    """One was trained on, one is in no split, one has no item of the catalogue."""
    people = Vocabulary.from_strings(["ann", "bob", "cy"])
    dataset = write_prepared(
        tmp_path / "data",
        train=lay_out([[1, 2]], [0]),
        test=lay_out([], []),
        user_ids=people.take([0]),
        item_ids=ENGINE.item_ids,
        settings={},
        counts={},
        everyone=people,
        whole=lay_out([[5, 1, 9]], [1]),
    )
    popular = make_engine(popularity=np.arange(40)[::-1].copy())
    catalogue = replace(Catalogue.of(popular), users=dataset)
    with TestClient(Service(NOWHERE, catalogue, ServerSettings(), print).app()) as client:

        def ask(**body: Any) -> dict[str, Any]:
            found: dict[str, Any] = client.post("/recommend", json=body).json()
            return found

        assert pairs(ask(user="ann", k=4)) == expected([101, 102], k=4)
        bob = ask(user="bob", k=40)
        assert (bob["source"], bob["known"], bob["unknown"]) == ("model", 3, [])
        assert pairs(bob) == expected([105, 101, 109], k=40)
        assert pairs(ask(user="bob", k=3, block=[103], keep_seen=True)) == expected(
            [105, 101, 109], k=3, block=[103], keep_seen=True
        )
        most = [(100, 39.0), (101, 38.0)]
        nobodies: list[dict[str, Any]] = [{"user": "cy"}, {"user": 7}, {"history": []}]
        for nobody in nobodies:
            found = ask(**nobody, k=2)
            assert (found["source"], found["known"], pairs(found)) == ("popular", 0, most)
        assert ask(history=[1]) == {"error": "no item of the history is in the catalogue: 1"}
        asked = [{"user": "ann", "k": 4}, {"history": [103]}, {"user": "?", "allow": [139, 120]}]
        results = client.post("/recommend", json=asked).json()["results"]
        assert pairs(results[0]) == expected([101, 102], k=4)
        assert pairs(results[1]) == expected([103])
        assert pairs(results[2]) == [(120, 19.0), (139, 0.0)]
    without = replace(catalogue, engine=ENGINE)  # an older run: what is popular is not known
    with TestClient(Service(NOWHERE, without, ServerSettings(), print).app()) as client:
        answer = client.post("/recommend", json={"user": "cy"})
        assert (answer.status_code, answer.json()) == (
            422,
            {"error": "user 'cy' has no item of the catalogue"},
        )


def test_many_at_once_are_answered_in_order(client: TestClient) -> None:
    asked: list[dict[str, Any]] = [{"history": [101], "k": 2}, {"history": [1]}, {"history": [102]}]
    found = client.post("/recommend", json=asked).json()["results"]
    assert pairs(found[0]) == expected([101], k=2)
    assert (found[1]["items"], found[1]["known"], found[1]["unknown"]) == ([], 0, [1])
    assert pairs(found[2]) == expected([102])


def test_more_items_than_there_are(client: TestClient) -> None:
    few = make_engine(table=ENGINE.table[:3], item_ids=ENGINE.item_ids.take([0, 1, 2]), titles=None)
    service = Service(NOWHERE, Catalogue.of(few), ServerSettings(), print)
    with TestClient(service.app()) as small:
        found = small.post("/recommend", json={"history": [100], "k": 20}).json()
        assert {one["item"] for one in found["items"]} == {101, 102}
        assert len(small.get("/similar/100?k=20").json()["items"]) == 2
        assert small.get("/items").json()["items"] == [{"item": n} for n in (100, 101, 102)]


def test_similar_items_and_search(client: TestClient) -> None:
    found = client.get("/similar/101?k=3").json()
    alike = ENGINE.similar(101, 3)
    assert pairs(found) == [*zip(alike.items, alike.scores.tolist(), strict=True)]
    (one,) = client.get("/items", params={"q": "iTEM 39"}).json()["items"]
    assert one == {"item": 139, "title": "Item 39"}
    assert client.get("/items?q=107").json()["items"] == [{"item": 107}]


def test_a_key_that_occurs_twice_is_refused(client: TestClient) -> None:
    headers = {"Content-Type": "application/json"}
    body = '{"history": [101], "block": [102], "block": [103]}'
    answer = client.post("/recommend", content=body, headers=headers)
    assert (answer.status_code, "'block' occurs twice" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"history": []}, 422, "no item of the history is in the catalogue: it is empty"),
        ({"history": [1, "\ud800"]}, 422, "no item of the history is in the catalogue: 1, "),
        ({"user": 4}, 400, "this server knows no users: give their history instead"),
        ({"user": None}, 400, "user is an id, integer or string; got None"),
        ({"user": [4]}, 400, "user is an id, integer or string; got [4]"),
        ({"k": 4}, 400, "a request needs a history"),
        ({"user": 4, "history": [1]}, 400, "a history or a user, whose history is known; got both"),
        ({"history": [1], "depth": 4}, 400, "'depth' is no part of a request: allow, block, "),
        ({"history": [1], "k": 21}, 400, "k is a whole number from 1 to 20 (--limits.k); got 21"),
        ({"history": [1], "k": True}, 400, "got True"),
        ({"history": [1], "k": "5"}, 400, "got '5'"),
        ({"history": [1] * 11}, 400, "history has 11 ids; at most 10 are taken (--limits.ids"),
        ({"history": [1], "allow": [[1]]}, 400, "allow: ids are integers or strings; got [1]"),
        ({"history": [1], "block": "x"}, 400, "block must be a list of ids; got 'x'"),
        ({"history": None}, 400, "history must be a list of ids; got None"),
        ({"history": [1], "keep_seen": 1}, 400, "keep_seen is true or false; got 1"),
        ({"history": [1], "times": [True]}, 400, "times are whole numbers of seconds; got [True]"),
        ({"history": [1, 1], "times": [9, 5]}, 400, "times do not go back, as the last event is"),
        ({"history": [1], "times": []}, 400, "a history of 1 events has as many times; got 0"),
        ([{"history": [1]}, 5], 400, "request 1: a request is an object"),
        ([], 400, "a list has 1 to 3 requests (--limits.requests); got 0"),
        ([{"history": [1]}] * 4, 400, "a list has 1 to 3 requests (--limits.requests); got 4"),
        (
            [{"history": [1], "k": 17}] * 3,
            400,
            "up to 50 items in all (--limits.items); got 51",
        ),
    ],
)
def test_what_is_wrong_is_said(client: TestClient, body: Any, status: int, error: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post("/recommend", content=json.dumps(body), headers=headers)
    assert answer.status_code == status
    assert error in answer.json()["error"]


def test_addresses_that_are_wrong(client: TestClient) -> None:
    for path, status, error in [
        ("/similar/99", 404, "item '99' is not in the catalogue"),
        ("/similar/", 404, "item '' is not in the catalogue"),
        ("/similar/101?k=0", 400, "k is a whole number"),
        ("/similar/101?k=²", 400, "k is a whole number"),
        ("/items?q=" + "x" * 201, 400, "q has at most 200 characters"),
        ("/items?query=x", 400, "'query' is no part"),
        ("/recommend", 405, "Method Not Allowed"),
        ("/no", 404, "Not Found"),
    ]:
        answer = client.get(path)
        assert (answer.status_code, error in answer.json()["error"]) == (status, True), path


def test_every_path_is_described(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    assert described["openapi"] == "3.1.0"
    assert {*described["paths"]} == {
        "/recommend",
        "/similar/{item}",
        "/items",
        "/healthz",
        "/metrics",
    }
    names = described["components"]["schemas"]
    assert names["Request"]["properties"]["k"]["maximum"] == 20
    found = client.post("/recommend", json={"history": [101]}).json()
    assert {*found} == {*names["Found"]["properties"]}
    assert {*found["items"][0]} <= {*names["Item"]["properties"]}
    health = described["paths"]["/healthz"]["get"]["responses"]["200"]["content"]
    properties = health["application/json"]["schema"]["properties"]
    assert {*client.get("/healthz").json()} == {*properties}


def test_metrics_count_what_was_asked() -> None:
    with TestClient(make_service().app()) as client:
        client.post("/recommend", json=[{"history": [101]}] * 3)
        client.get("/similar/101")
        client.get("/similar/99")
        client.get("/secret/path")
        lines = client.get("/metrics").text.splitlines()
    assert {
        'sce_requests_total{path="/recommend",status="200"} 1',
        'sce_requests_total{path="/similar/{item}",status="200"} 1',
        'sce_requests_total{path="/similar/{item}",status="404"} 1',
        'sce_requests_total{path="other",status="404"} 1',
        'sce_batch_size_bucket{le="4"} 3',
        "sce_batch_size_count 3",
        "sce_batch_size_sum 5.0",
        'sce_request_seconds_bucket{le="+Inf"} 4',
        "sce_queue_length 0",
        "sce_items 40",
    } <= {*lines}
    assert any(line.startswith('sce_info{version="one",sce="') for line in lines)


def test_the_token_is_needed_for_all_but_page_and_health() -> None:
    with TestClient(make_service(token="right-token").app()) as client:
        for given in (None, "right-token", "Bearer wrong-token", "Bearer right-tokem", "bearer"):
            headers = {} if given is None else {"Authorization": given}
            for path in ("/items", "/metrics", "/openapi.json", "/similar/101", "/no"):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert client.get("/").status_code == client.get("/healthz").status_code == 200
        for scheme in ("bearer", "BEARER ", "Bearer"):
            right = {"Authorization": f"{scheme} right-token"}
            assert client.get("/items", headers=right).status_code == 200
        assert client.get("/openapi.json", headers=right).json()["security"] == [{"token": []}]


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, token: bytes) -> bool:
        compared.append((given, token))
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    with TestClient(make_service(token="right-token").app()) as client:
        for given in ("right-token", "x"):  # nothing else decides
            headers = {"Authorization": f"Bearer {given}"}
            assert client.get("/items", headers=headers).status_code == 401
    assert compared == [(b"right-token", b"right-token"), (b"x", b"right-token")]


def test_beyond_the_queue_requests_are_refused_with_503() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def encode(embedded: Any, lengths: Any) -> Any:
        begun.set()
        go_on.wait(30)
        return ENGINE.encode(embedded, lengths)

    service = make_service(queue=2)
    service.catalogue = replace(service.catalogue, engine=replace(ENGINE, encode=encode))
    with TestClient(service.app()) as client, ThreadPoolExecutor(3) as threads:

        def ask(_: object = None) -> Any:
            return client.post("/recommend", json={"history": [101]})

        first = threads.submit(ask)
        begun.wait(30)
        waiting = [threads.submit(ask) for _ in range(2)]
        while "sce_queue_length 2" not in client.get("/metrics").text:
            pass
        refused = ask()
        assert client.get("/healthz").status_code == 200
        go_on.set()
        assert [one.result().status_code for one in (first, *waiting)] == [200] * 3
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert refused.json() == {"error": "too many requests are waiting; try again"}


def test_files_replaced_before_the_first_look_are_taken_up_once(tmp_path: Path) -> None:
    source = Source(write_export(tmp_path / "export"))
    catalogue, told = source.load(), Queue[str]()
    write_export(source.path, seed=1)
    service = Service(source, catalogue, ServerSettings(watch=0.01), told.put)
    with TestClient(service.app()) as client:
        assert told.get(timeout=30).startswith("serves version ")
        assert client.get("/healthz").json()["version"] == source.load().engine.version
        (source.path / "encoder.onnx").write_bytes(b"")
        assert told.get(timeout=30).startswith("refused a new version")
        for _ in range(20):
            client.get("/healthz")
    assert told.empty()  # what was refused is not tried again


def test_lists_are_read_again_whether_or_not_the_new_version_is_taken(tmp_path: Path) -> None:
    stock, told = tmp_path / "stock.txt", Queue[str]()
    stock.write_text("101\n102\n")
    path, offer = write_export(tmp_path / "export"), partial(offered, allow=stock, block=None)
    source = Source(path, (stock,), read_offered=offer)
    service = Service(source, source.load(), ServerSettings(watch=0.01), told.put)
    with TestClient(service.app()) as client:

        def next_line(beginning: str, items: list[int], refused: int) -> None:
            assert told.get(timeout=30).startswith(beginning)
            found = client.post("/recommend", json={"history": [110]}).json()["items"]
            assert sorted(one["item"] for one in found) == items
            assert f"\nsce_newest_refused {refused}\n" in client.get("/metrics").text

        stock.write_text("102\n")
        next_line("read the lists again, for version ", [102], 0)
        encoder = (path / "encoder.onnx").read_bytes()
        (path / "encoder.onnx").write_bytes(b"")
        next_line("refused a new version, and goes on with ", [102], 1)
        stock.write_text("103\n104\n")  # where there was nothing but the refusal once more
        next_line("read the lists again", [103, 104], 1)
        next_line("refused a new version", [103, 104], 1)
        stock.write_text("")
        next_line("refused new lists, and goes on with ", [103, 104], 1)
        next_line("refused a new version", [103, 104], 1)
        path.rename(tmp_path / "away")  # while it is being replaced, nothing is said of it
        stock.write_text("105\n")
        next_line("read the lists again", [105], 1)
        (tmp_path / "away" / "encoder.onnx").write_bytes(encoder)
        (tmp_path / "away").rename(path)
        next_line("loaded version ", [105], 0)
        stock.write_text("7\n")  # an item of the next version alone
        next_line("refused new lists", [105], 0)
        new = tmp_path / "items.jsonl"
        new.write_text('{"item_id": 7, "similar_to": [101]}')
        add_items(path, new, path, force=True)
        assert "no item of the catalogue is left" in told.get(timeout=30)  # in that which is served
        next_line("serves version ", [7], 0)


def test_a_request_that_fails_does_not_fail_others(capsys: pytest.CaptureFixture[str]) -> None:
    def encode(embedded: Any, lengths: Any) -> Any:
        if (lengths == 2).any():
            raise RuntimeError("a bug")
        return ENGINE.encode(embedded, lengths)

    catalogue = Catalogue.of(replace(ENGINE, encode=encode))
    works: list[Any] = [Request([101]), Request([101, 102]), lambda _: 1 / 0, lambda _: "done"]
    found = catalogue.answer(works)
    assert pairs(found[0]) == expected([101])
    assert str(found[1]) == "a bug"
    assert isinstance(found[2], ZeroDivisionError)
    assert found[3] == "done"
    service = Service(NOWHERE, catalogue, ServerSettings(), print)
    with TestClient(service.app(), raise_server_exceptions=False) as client:
        answer = client.post("/recommend", json={"history": [101, 102]})
        assert answer.status_code == 500
        assert answer.json() == {"error": "the server failed; its log says why"}
        assert client.post("/recommend", json={"history": [101]}).status_code == 200


def test_a_request_that_takes_too_long_is_given_up() -> None:
    go_on = threading.Event()
    service = make_service(patience=0.1)

    def encode(embedded: Any, lengths: Any) -> Any:
        go_on.wait(30)
        return ENGINE.encode(embedded, lengths)

    slow = replace(ENGINE, encode=encode)
    service.catalogue = replace(service.catalogue, engine=slow)
    with TestClient(service.app()) as client:
        answer = client.post("/recommend", json={"history": [101]})
        go_on.set()
    assert answer.status_code == 408
    assert answer.json() == {"error": "the request took more than 0.1 seconds"}


@pytest.mark.parametrize("name", ["history", "allow", "block"])
def test_lists_may_have_as_many_ids_as_the_limit_and_no_more(client: TestClient, name: str) -> None:
    for count, status in ((10, 200), (11, 400)):
        body = {"history": [101], name: [101, 102] * 5 + [103] * (count - 10)}
        assert client.post("/recommend", json=body).status_code == status


def test_a_user_is_not_true_or_false(client: TestClient) -> None:
    answer = client.post("/recommend", json={"user": True})
    assert answer.json()["error"] == "user is an id, integer or string; got True"
