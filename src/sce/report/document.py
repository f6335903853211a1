"""A whole HTML document: style and script inside, and a policy that allows nothing else."""

import base64
import hashlib

from sce.report.markup import Markup, element


def make_document(title: str, body: Markup, *, style: str, script: str) -> str:
    """Put a page together.

    Args:
        title: Of the window.
        body: What stands between the body tags; the script comes after it.
        style: All CSS.
        script: All JavaScript.
    """
    # Should anything in a name or id ever get past the escaping, it still cannot run.
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", title),
        element("style", Markup(style)),
    )
    page = element(
        "html", head, element("body", body, element("script", Markup(script))), lang="en"
    )
    return f"<!doctype html>\n{page}\n"


def _digest(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
