import inspect
import subprocess
import sys

import pytest

import sce


@pytest.mark.parametrize("name", sce.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(sce, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sce.nothing


def test_help_shows_defaults_that_can_be_read() -> None:
    for name in sce.__all__:
        made = getattr(sce, name)
        if inspect.isfunction(made):
            assert " at 0x" not in str(inspect.signature(made)), name


def test_padding_is_what_fit_says_it_is() -> None:
    assert sce.PADDING == -1
    assert "`sce.PADDING`, which is -1" in (sce.fit.__doc__ or "")


def test_without_polars_the_extra_is_named() -> None:
    code = "import sys; sys.modules['polars'] = None; from sce import *"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stderr.splitlines()[-1] == (
        "sce.errors.InputError: sce.read_interactions needs polars, which is not installed; "
        "install it with: pip install 'scalable-cross-entropy[prepare]'"
    )


def test_importing_is_light() -> None:
    heavy = "{'torch', 'polars', 'triton', 'narwhals'}"
    code = f"import sys, sce; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
