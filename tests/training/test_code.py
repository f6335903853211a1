"""An edited function or class is another loss; a comment or another place in the file is not."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sce.errors import InputError
from sce.training.describe import describe_loss, describe_model
from tests.cycle_data import make_cycle, train

HEAD = """
import torch
from torch import nn
from sce.losses import CrossEntropy
exact = CrossEntropy()
"""
BODY = """
SCALE = 2.0
def helper(value, by=1.5):
    return SCALE * value * by
def loss(states, catalogue, targets):
    return 3 * helper(exact(states, catalogue, targets))
class Loss(nn.Module):
    power = 1
    def forward(self, states, catalogue, targets):
        return helper(exact(states, catalogue, targets)) if self.power in {"a", "b", 1} else 0
class Derived(Loss):
    pass
"""
SAME = [
    "\n# moved, with a comment\nUNUSED = 1\n" + BODY,
    BODY.replace("targets):\n", "targets: torch.Tensor):\n    'Say what it is.'\n", 1),
]
EDITED = BODY.replace("value * by", "value + by")


def written(text: str, name: str) -> Any:
    """The loss of this name in a module of this text."""
    module: dict[str, Any] = {"__name__": "mine"}
    exec(compile(HEAD + text, "mine.py", "exec"), module)
    found = module[name]
    return found() if isinstance(found, type) else found


@pytest.mark.parametrize("name", ["loss", "Loss", "Derived"])
def test_another_body_is_another_loss_and_a_comment_is_not(name: str) -> None:
    known = describe_loss(written(BODY, name))
    assert [describe_loss(written(text, name)) for text in SAME] == [known] * 2
    edits = {"SCALE = 2.0": "SCALE = 2.5", "by=1.5": "by=1.0"}
    edits |= {"3 * helper": "4 * helper"} if name == "loss" else {"power = 1": "power = 2"}
    texts = [EDITED, *(BODY.replace(old, new) for old, new in edits.items())]
    for text in texts:
        assert describe_loss(written(text, name)) != known, text


@pytest.mark.parametrize("call", ["other.helper", "helper"])
def test_what_another_module_of_ones_own_does_counts(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"import other\nfrom other import helper\ndef loss(states, *_): return {call}(states)"
    found = []
    for body in ("states + 1", "states + 1  # the same", "states + 2"):
        other = ModuleType("other")
        exec(f"def helper(states): return {body}", vars(other))
        monkeypatch.setitem(sys.modules, "other", other)
        found.append(describe_loss(written(text, "loss")))
    assert found[0] == found[1] != found[2]


def test_code_that_ran_often_and_elsewhere_is_the_same() -> None:
    loss = written(BODY, "Loss")
    for _ in range(50):  # Python adapts what it runs often
        loss(torch.rand(2, 3), torch.rand(4, 3), torch.tensor([0, 1]))
    script = (
        "from tests.training.test_code import *;"
        "print(*describe_loss(written(BODY, 'Loss')).values())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    said = subprocess.check_output([sys.executable, "-c", script], text=True, env=environment)
    assert said.split() == [*describe_loss(loss).values()]


def test_a_run_is_not_resumed_with_an_edited_loss(tmp_path: Path) -> None:
    dataset, out = make_cycle(tmp_path / "data"), tmp_path / "run"
    train(dataset, written(BODY, "loss"), out=out, epochs=1)
    with pytest.raises(InputError, match=r"another body of the loss mine.loss.*config={'loss': {'"):
        train(dataset, written(EDITED, "loss"), out=out, resume=True)
    train(dataset, written(SAME[0], "loss"), out=out, resume=True)
    known = {"loss": {"name": "mine.loss"}}
    train(dataset, written(EDITED, "loss"), out=out, resume=True, epochs=3, config=known)


def test_an_edited_model_is_another_and_sces_own_have_no_code() -> None:
    text = "class Model(nn.Module):\n    def forward(self, histories): return {}"
    one, other = (describe_model(written(text.format(value), "Model")) for value in (1, 2))
    assert one != other
    assert not any("code" in name for name in describe_loss(written("", "exact")))
