"""The server's interface, in the words of OpenAPI."""

from typing import Any

from sce import __version__
from sce.serving.asking import Limits

_ID = {"oneOf": [{"type": "integer"}, {"type": "string"}]}
_UNKNOWN = {"type": "array", "items": _ID}


def describe(limits: Limits, *, with_token: bool) -> dict[str, Any]:
    """The description of a server with these limits."""

    def ids(meaning: str) -> dict[str, Any]:
        return {"type": "array", "items": _ID, "maxItems": limits.ids, "description": meaning}

    depth = {"type": "integer", "minimum": 1, "maximum": limits.k, "default": 10}
    request = _object(
        [],
        user=_ID | {"description": "A user of the log, instead of a history: --data of sce serve."},
        history=ids("Items of the user, the oldest first. Unknown ones are passed over."),
        k=depth,
        allow=ids("Recommend nothing but these."),
        block=ids("Do not recommend these."),
        keep_seen={"type": "boolean", "default": False},
        times={
            "type": "array",
            "items": {"type": "integer"},
            "maxItems": limits.ids,
            "description": "Seconds of each event, for a model that uses times.",
        },
    )
    request["oneOf"] = [{"required": ["history"]}, {"required": ["user"]}]
    item = _object(["item"], item=_ID, title={"type": "string"}, score={"type": "number"})
    named = {"type": "array", "items": _of("Item")}
    version, whole = {"type": "string"}, {"type": "integer"}
    health = _object(["status", "version", "items"], status=version, version=version, items=whole)
    found = _object(
        ["items", "source", "known", "unknown", "ignored", "version"],
        items=named,
        source={"enum": ["model", "popular"], "description": "popular: no event is known."},
        known=whole | {"description": "Events of the history in the catalogue."},
        unknown=_UNKNOWN | {"description": "The other events, not in the catalogue."},
        ignored=_UNKNOWN | {"description": "Ids of allow and block not in the catalogue."},
        version=version,
    )
    many = _object(["results"], results=_array("Found", None))
    count = {"name": "k", "in": "query", "schema": depth}
    query = {"name": "q", "in": "query", "schema": {"type": "string", "maxLength": 200}}
    which = {"name": "item", "in": "path", "required": True, "schema": {"type": "string"}}
    body = {"oneOf": [_of("Request"), _array("Request", limits.requests)]}
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
        "Item": item,
        "Items": _object(["items"], items=named),
        "Found": found,
        "FoundMany": many,
        "Error": _object(["error"], error={"type": "string"}),
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


def _array(name: str, most: int | None) -> dict[str, Any]:
    return {"type": "array", "items": _of(name)} | ({"maxItems": most} if most else {})


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
