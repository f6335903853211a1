"""Requests that nobody should send, as bytes."""

import json
from typing import Any
from urllib.parse import quote

_LENGTH = 1 << 20  # the largest body that is taken


def http(method: str, path: str, body: bytes = b"", kind: str | None = "application/json") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
    if kind is not None:
        head += f"Content-Type: {kind}\r\n"
    return head.encode("utf-8") + b"Content-Length: %d\r\n\r\n" % len(body) + body


def bodies() -> list[bytes]:
    """Bodies for /recommend."""
    wrong_ids: list[Any] = [None, True, 1.5, 1e308, [], {}, [[]], {"a": 1}]
    wrong_ids += ["", "x", 0, 5, -1, 1e10, False]
    not_ids: list[Any] = [None, True, 1.5, 1e308, [], {}, [1], {"item": 1}]
    depths: list[Any] = [0, -1, 1001, 10**30, 1.0, 0.5, "10", "", None, True]
    depths += [[], [10], {}, "ten", 1e400]
    given: list[Any] = [{"history": one} for one in wrong_ids]
    given += [{"history": [one]} for one in not_ids]
    given += [{"history": [101, one]} for one in not_ids]
    no_lists: list[Any] = ["", 5, {}]
    given += [{"history": [101], name: one} for name in ("allow", "block") for one in no_lists]
    given += [{"history": [101], name: [one]} for name in ("allow", "block") for one in not_ids]
    given += [{"history": [101], "k": one} for one in depths]
    given += [{"history": [101], "keep_seen": one} for one in (None, 0, 1, "true", *no_lists)]
    given += [{"history": [101], "times": one} for one in ([], [0.5], *no_lists)]
    given += [{"history": [101], name: 1} for name in ("K", "History", "", "\0", "__class__", "é")]
    given += [{"user": one} for one in (1, "x", None, [101])]
    # Ids that no catalogue has.
    unknown: list[Any] = [0, -1, 2**63, -(2**63), 10**4000, "", "\0", "101\0", " 101", "0101"]
    unknown += ["1e2", "١٠١", "\ud800", "\U0001f4a9" * 100, "x" * 100_000, "../../etc/passwd"]
    given += [{"history": [one]} for one in unknown]
    given += [None, True, 5, 1.5, "history", [], [[]], [[{"history": [101]}]], [None], {}]
    given += [[{"history": [101]}, one] for one in (None, *no_lists, {"history": 5})]
    given += [{"history": [101] * 10_001}, {"history": [101], "allow": [101] * 10_001}]
    given += [[{"history": [101]}] * 257]
    texts = [json.dumps(one).encode() for one in given]
    texts += [b"", b" ", b"{", b"}", b"[", b'{"history": [101]', b'{"history": [101]}}', b"\0"]
    texts += [b'{"history": [101],}', b"{'history': [101]}", b"history=101", b"\xff\xfe", b"\xef"]
    texts += [b'{"history": ["\xff"]}', b'{"history": [NaN]}', b'{"history": [Infinity]}']
    texts += [b'{"history": [1' + b"0" * 5000 + b"]}", b'{"history": ["\\ud800"]}', b"nul"]
    texts += [b"[" * 100_000, b'{"history":' * 50_000, b"[" * 100_000 + b"]" * 100_000]
    texts += [b" " * (_LENGTH + 1), b"x" * (3 * _LENGTH), b'"' + b"x" * _LENGTH + b'"']
    return texts


def requests() -> list[bytes]:
    """All of them."""
    right = b'{"history": [101]}'
    made = [http("POST", "/recommend", body) for body in bodies()]
    kinds = [None, "", "text/plain", "application/xml", "application/x-www-form-urlencoded"]
    kinds += ["application/jsonx", "multipart/form-data; boundary=x", "json", "\x7f"]
    made += [http("POST", "/recommend", right, kind) for kind in kinds]
    methods = ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"]
    made += [http(method, "/recommend", right) for method in methods]
    made += [
        http(method, path) for method in ("POST", "DELETE") for path in ("/", "/items", "/metrics")
    ]
    secrets = ["/etc/passwd", "/export.json", "/encoder.onnx", "/static/page.html", "/page.html"]
    tricks = ["/..", "/../", "//", "/.", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc%2fpasswd"]
    tricks += ["/static/../server.py", "/healthz/", "/recommend/", "/%00", "/%ff", "/items%00"]
    tricks += ["/" + "x" * 10_000, "/" + quote("é💩"), "/\\..\\..", "/similar", "/favicon.ico"]
    tricks += ["//etc/passwd", "/;/", "/openapi.json/", "/metrics/.."]
    made += [http("GET", path) for path in (*secrets, *tricks)]
    items = ["", "0", "%00", "..%2f..%2fetc%2fpasswd", "../../etc/passwd", "%ff", "1" * 5000, "x/y"]
    made += [http("GET", f"/similar/{item}") for item in items]
    depths = ["0", "-1", "1001", "ten", "", "1e3", "%00", "9" * 5000, "١"]
    made += [
        http("GET", f"/{of}?k={quote(k, '%')}") for of in ("similar/101", "items") for k in depths
    ]
    made += [http("GET", "/items?q=" + "x" * 201), http("GET", "/items?x=1")]
    return made + broken()


def broken() -> list[bytes]:
    """What is not HTTP, or too much of it."""
    head = b"POST /recommend HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return [
        b"\r\n\r\n\r\nhello\r\n\r\n",
        b"\0" * 100 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x05" * 64 + b"\r\n\r\n",  # TLS
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"FETCH / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHo st: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\0b\r\n\r\n",
        b"GET / HTTP/1.1\r\n: x\r\n\r\n",
        head + b"Content-Length: -1\r\n\r\n",
        head + b"Content-Length: x\r\n\r\n",
        head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        head + b"Content-Length: " + b"9" * 100 + b"\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        head + b"".join(b"X-%d: %s\r\n" % (n, b"x" * 1000) for n in range(200)),
        b"GET /" + b"x" * 200_000,
    ]
