from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text in which each of 40 words is followed by the next."""
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"word{n % 40}" for n in range(3000)))
    return file
