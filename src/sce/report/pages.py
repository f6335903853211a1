"""Self-contained HTML documents from the templates: style inside, no script, no request."""

import base64
import hashlib
from datetime import datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from sce import __version__

_TEMPLATES = Environment(
    loader=PackageLoader("sce.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


def render(template: str, title: str, *, written: datetime, **content: Any) -> str:
    """Render a template; its policy allows the style inside and nothing else."""
    style = files("sce.report").joinpath("templates/style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    found = _TEMPLATES.get_template(template)
    return found.render(
        title=title, style=style, digest=digest, version=__version__, written=written, **content
    )
