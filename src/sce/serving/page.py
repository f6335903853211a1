"""The page at /, one file; its policy allows its own script and style and nothing else."""

import base64
import hashlib
import re
from importlib.resources import files

PAGE = files("sce.serving").joinpath("static/page.html").read_text(encoding="utf-8")


def _digest(element: str) -> str:
    (text,) = re.findall(rf"<{element}>(.*?)</{element}>", PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# The icon is an image in the page.
POLICY = (
    f"default-src 'none'; script-src {_digest('script')}; style-src {_digest('style')}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
