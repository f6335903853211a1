"""The documentation site: make docs. Pages are Markdown; commands and API are asked of the code."""

import io
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

import sce  # noqa: E402
from sce.cli import VERBS  # noqa: E402
from sce.cli import app as cli  # noqa: E402

project, author, release = "sce", "the authors of sce", sce.__version__
copyright = "Apache-2.0"  # noqa: A001
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_made"]
html_theme = "furo"
html_title = f"sce {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_copyright = html_show_sphinx = html_copy_source = False
myst_heading_anchors = 4
default_role = "code"  # `names` in docstrings
napoleon_use_ivar = True
autodoc_typehints = "none"  # signatures have them
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_display_short_literal_types = True
nitpicky = False

GROUPS = {
    "Losses": "losses", "Data": "data", "Models": "models", "Training": "training|optim",
    "Evaluating and recommending": "evaluation|recommend", "Errors": "errors",
}  # fmt: skip
MORE = [  # bases and results, which the others name
    ("Loss", "sce.losses"),
    ("SampledLoss", "sce.losses.sampled"),
    ("Negatives", "sce.losses.negatives"),
    ("Draw", "sce.losses.negatives"),
    ("Backbone", "sce.models.base"),
    ("FitResult", "sce.training.fit"),
]
NUMBERS = {"PADDING": "Fills the histories of a batch. In targets padding is -100."}


def _commands() -> str:
    parts = []
    for verb in VERBS:
        shown = io.StringIO()
        cli.help_print([verb], console=Console(file=shown, width=88, color_system=None))
        text = re.sub(r"^╭─ (\w.*?) ─*╮$", r"\n\1:", shown.getvalue(), flags=re.MULTILINE)
        text = re.sub(r"^╰─*╯\n|^│|[ \t]*│?[ \t]*$", "", text, flags=re.MULTILINE).strip()
        parts.append(f"## sce {verb}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def _api() -> str:
    parts = []
    for title, modules in GROUPS.items():
        parts.append(f"## {title}\n")
        # What most look for comes first.
        names = sorted(sce._MODULES.items(), key=lambda one: one[0] != "ScalableCrossEntropy")
        for name, module in [*names, *MORE]:
            if re.match(rf"sce\.({modules})\b", module):
                made = getattr(import_module(module), name)
                kind = "class" if isinstance(made, type) else "function"
                home = module if (name, module) in MORE else "sce"
                entry = f".. auto{kind}:: {home}.{name}"
                if not callable(made):  # a number: Python would document int()
                    entry = f".. py:data:: {home}.{name}\n   :value: {made!r}\n\n   {NUMBERS[name]}"
                elif "Attributes:" in f"{made.__doc__}":  # fields are listed there
                    entry += "\n   :no-members:"
                parts.append(f"```{{eval-rst}}\n{entry}\n```\n")
    return "\n".join(parts)


_fields: dict[str, list[str]] = {}


def _keep(_: Any, what: str, name: str, *rest: Any) -> None:
    """Escape NDCG@10, which is no address; keep what napoleon would take for a type: "Items: …"."""
    for at, line in enumerate(rest[-1]):
        if ">>>" not in line:
            rest[-1][at] = re.sub(r"(?<![`\w])(\w+)@(\d)", r"\1\\@\2", line)
    if what in ("attribute", "property"):
        _fields[name] = [*rest[-1]]


def _restore(_: Any, what: str, name: str, *rest: Any) -> None:
    rest[-1][:] = _fields.pop(name, rest[-1])


def setup(app: Any) -> None:
    """Write what the pages `commands` and `api` include."""
    app.connect("autodoc-process-docstring", _keep, priority=400)
    app.connect("autodoc-process-docstring", _restore, priority=600)
    made = HERE / "_made"
    made.mkdir(exist_ok=True)
    (made / "commands.md").write_text(_commands(), "utf-8")
    (made / "api.md").write_text(_api(), "utf-8")
