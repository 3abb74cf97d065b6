"""What all tests share: one thread a worker (two workers run side by side), `import support`, `import benchmarks`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

LONGEST = (
    "test_mypy_strict",
    "test_the_site_builds_links_searches_and_documents_every_public_name",
    "test_torchrun_equals_one_process",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no worker is left alone with one of them at the end."""
    items.sort(key=lambda item: item.name not in LONGEST)


@pytest.fixture(autouse=True, scope="session")
def prepared_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that a test prepares go to a folder of this session, not to the user's cache."""
    from torchcaps.data import prepared

    folder = tmp_path_factory.mktemp("prepared")
    prepared.cache_dir = lambda: folder
    return folder
