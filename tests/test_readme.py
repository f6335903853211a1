"""The README's code, as it is printed there."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_loss_alone() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "torch.randn" in block]
    names: dict[str, object] = {}
    exec(block, names)
    assert names["states"].grad.isfinite().all()  # type: ignore[attr-defined]
    assert names["catalogue"].grad.abs().sum() > 0  # type: ignore[attr-defined]
