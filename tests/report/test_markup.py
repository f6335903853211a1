import doctest

import pytest

from sce import units
from sce.report import markup, parts
from sce.report.markup import element, join


def test_text_is_escaped_and_markup_is_not() -> None:
    inner = element("b", 'a < b & "c"')
    assert inner == "<b>a &lt; b &amp; &quot;c&quot;</b>"
    assert element("p", inner, "<i>") == f"<p>{inner}&lt;i&gt;</p>"
    assert join("<", [inner, ">"], None) == f"&lt;{inner}&gt;"


def test_attributes_are_escaped_rounded_or_left_out() -> None:
    made = element(
        "a", title='"><script>', class_="x", aria_label="it's", rx=1 / 3, cx=2.0, id=None
    )
    assert made == (
        '<a title="&quot;&gt;&lt;script&gt;" class="x" aria-label="it&#x27;s" rx="0.33" cx="2"></a>'
    )


def test_what_has_no_end_has_none() -> None:
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'


@pytest.mark.parametrize("module", [markup, units, parts])
def test_the_examples_are_right(module: object) -> None:
    found = doctest.testmod(module)  # type: ignore[arg-type]
    assert found.attempted > 0
    assert found.failed == 0
