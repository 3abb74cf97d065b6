"""Draw the pictures of README and docs from a run of the demo.

torchcaps demo && python experiments/pictures.py runs/demo/capsnet-glyphs
"""

from __future__ import annotations

import sys
from pathlib import Path

from torchcaps.evaluate.figures import overview
from torchcaps.models import CapsNet
from torchcaps.train import load_run

ROOT = Path(__file__).parents[1]


def main(run: str) -> None:
    loaded = load_run(run)
    assert isinstance(loaded.model, CapsNet)
    path = ROOT / "docs" / "pictures" / "demo.png"
    path.write_bytes(overview(loaded.model, loaded.recipe.data.load().test))
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
