"""The server's interface, in the words of OpenAPI."""

from typing import Any

from sce import __version__
from sce.serving.asking import Limits

_ID = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
_TEXT, _WHOLE, _IDS = {"type": "string"}, {"type": "integer"}, {"type": "array", "items": _ID}


def describe(limits: Limits, *, with_token: bool) -> dict[str, Any]:
    """The description of a server with these limits."""

    def ids(meaning: str) -> dict[str, Any]:
        return _IDS | {"maxItems": limits.ids, "description": meaning}

    depth = _WHOLE | {"minimum": 1, "maximum": limits.k, "default": 10}
    request = _object(
        [],
        user=_ID | {"description": "A user of the log, instead of a history: --data of sce serve."},
        history=ids("Items of the user, the oldest first. Unknown ones are passed over."),
        k=depth,
        allow=ids("Recommend nothing but these."),
        block=ids("Do not recommend these."),
        keep_seen={"type": "boolean", "default": False},
        times=ids("Seconds of each event, for a model that uses times.") | {"items": _WHOLE},
    )
    request["oneOf"] = [{"required": ["history"]}, {"required": ["user"]}]
    health = _object(["status", "version", "items"], status=_TEXT, version=_TEXT, items=_WHOLE)
    found = _object(
        ["items", "source", "known", "unknown", "ignored", "version"],
        items=_array("Item"),
        source={"enum": ["model", "popular"], "description": "popular: no event is known."},
        known=_WHOLE | {"description": "Events of the history in the catalogue."},
        unknown=_IDS | {"description": "The other events, not in the catalogue."},
        ignored=_IDS | {"description": "Ids of allow and block not in the catalogue."},
        version=_TEXT,
    )
    count = {"name": "k", "in": "query", "schema": depth}
    query = {"name": "q", "in": "query", "schema": _TEXT | {"maxLength": 200}}
    which = {"name": "item", "in": "path", "required": True, "schema": _TEXT}
    body = {"oneOf": [_of("Request"), _array("Request") | {"maxItems": limits.requests}]}
    paths = {
        "/recommend": {
            "post": {
                "summary": "Recommend items after a history, or for a user; or for each of many.",
                "requestBody": {"required": True, "content": _json(body)},
                "responses": _answers({"oneOf": [_of("Found"), _of("FoundMany")]}),
            }
        },
        "/similar/{item}": _get("The items most like one.", _of("Items"), which, count),
        "/items": _get("Items by a part of title or id.", _of("Items"), query, count),
        "/healthz": _get("Whether the server answers.", health),
        "/metrics": _get("Counts, in the text format of Prometheus.", None),
    }
    schemas = {
        "Request": request,
        "Item": _object(["item"], item=_ID, title=_TEXT, score={"type": "number"}),
        "Items": _object(["items"], items=_array("Item")),
        "Found": found,
        "FoundMany": _object(["results"], results=_array("Found")),
        "Error": _object(["error"], error=_TEXT),
    }
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "sce serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if with_token:
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"token": []}]
    return described


def _of(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _array(name: str) -> dict[str, Any]:
    return {"type": "array", "items": _of(name)}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _answers(schema: dict[str, Any] | None) -> dict[str, Any]:
    content = {"text/plain": {}} if schema is None else _json(schema)
    error = {"description": "What was wrong.", "content": _json(_of("Error"))}
    busy = {"description": "Too many wait; see Retry-After.", "content": _json(_of("Error"))}
    return {"200": {"description": "Found.", "content": content}, "4XX": error, "503": busy}


def _get(summary: str, schema: dict[str, Any] | None, *parameters: Any) -> dict[str, Any]:
    return {
        "get": {"summary": summary, "parameters": list(parameters), "responses": _answers(schema)}
    }
