from collections.abc import Iterator

import pytest

from tests.distributed.pool import Run, start_pool


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run `work(ranks, *arguments)` on so many ranks; returns the result of each."""
    with start_pool(tmp_path_factory.mktemp("ranks") / "meeting") as run:
        yield run
