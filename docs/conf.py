"""The documentation site: make docs. Pages are Markdown; commands and API are asked of the code."""

import io
import re
import sys
from importlib import import_module
from pathlib import Path

from rich.console import Console

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

import sce  # noqa: E402
from sce.cli import VERBS, app  # noqa: E402

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
autodoc_default_options = {"members": True, "exclude-members": "memory"}  # for sce plan
python_display_short_literal_types = True
nitpicky = False

GROUPS = {
    "Losses": "losses", "Data": "data", "Models": "models", "Training": "training|optim",
    "Evaluating and recommending": "evaluation|recommend", "Errors": "errors",
}  # fmt: skip
MORE = [  # bases and results, which the others name
    ("Loss", "sce.losses"),
    ("SampledLoss", "sce.losses.sampled"),
    ("Backbone", "sce.models.base"),
    ("FitResult", "sce.training.fit"),
]


def _commands() -> str:
    parts = []
    for verb in VERBS:
        shown = io.StringIO()
        app.help_print([verb], console=Console(file=shown, width=88, color_system=None))
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
                kind = kind if callable(made) else "data"
                home = module if (name, module) in MORE else "sce"
                parts.append(f"```{{eval-rst}}\n.. auto{kind}:: {home}.{name}\n```\n")
    return "\n".join(parts)


def setup(_: object) -> None:
    """Write what the pages `commands` and `api` include."""
    made = HERE / "_made"
    made.mkdir(exist_ok=True)
    (made / "commands.md").write_text(_commands(), "utf-8")
    (made / "api.md").write_text(_api(), "utf-8")
