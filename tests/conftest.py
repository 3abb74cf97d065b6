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
COMPILING = ("kernels", "contract", "benchmarks", "routing", "layers", "models")
"""Folders whose tests compile most of the loops."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests such that two workers, who get a half each, do not compile the same loops at the same time.

    The first worker begins with the tests that compile, and stores what it compiled on disk. The second begins with the
    longest tests, of which none compiles, so that nobody is left alone with one of them at the end.
    """
    root = Path(__file__).parent
    items.sort(
        key=lambda item: not (item.path.is_relative_to(root) and item.path.relative_to(root).parts[0] in COMPILING)
    )
    longest = [item for item in items if item.name in LONGEST]
    others = [item for item in items if item.name not in LONGEST]
    half = len(items) // 2
    items[:] = [*others[:half], *longest, *others[half:]]


@pytest.fixture(autouse=True, scope="session")
def prepared_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that a test prepares go to a folder of this session, not to the user's cache."""
    from torchcaps.data import prepared

    folder = tmp_path_factory.mktemp("prepared")
    prepared.cache_dir = lambda: folder
    return folder
