"""What all tests share: one thread a worker (two workers run side by side), `import support`, `import benchmarks`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.fixture(autouse=True, scope="session")
def prepared_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that a test prepares go to a folder of this session, not to the user's cache."""
    from torchcaps.data import prepared

    folder = tmp_path_factory.mktemp("prepared")
    prepared.cache_dir = lambda: folder
    return folder
