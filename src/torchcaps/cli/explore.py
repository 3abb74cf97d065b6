"""torchcaps explore"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from torchcaps.explore.shelf import Shelf

__all__ = ["Explore"]


@dataclass(frozen=True)
class Explore:
    """Look into capsule networks in the browser: what fires, who votes for whom, what each number of a pose does.

    Without a run it offers a small one that comes with the package, and those under ./runs. Ctrl-C ends it.

    Example: torchcaps explore runs/capsnet-mnist-small-0 --no-browser
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Folders of runs of capsule networks."""
    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own lets others in."""
    port: int = 0
    """Port to listen on; 0 is a free one."""
    no_browser: bool = False
    """Print the address only."""
    data_dir: Path | None = None
    """A folder to look for the runs' test images in, before TORCHCAPS_DATA and the cache."""

    def run(self) -> int:
        serve, find_shelf, is_loopback = _parts()
        shelf = find_shelf(self.runs, self.data_dir)
        if not is_loopback(self.host):
            print(
                f"torchcaps: --host {self.host} lets every machine that reaches this one use the explorer, unencrypted "
                "and without a password",
                file=sys.stderr,
            )
        try:
            serve(shelf, self.host, self.port, self._ready)
        except KeyboardInterrupt:
            print("torchcaps explore: ended", file=sys.stderr)
        return 0

    def _ready(self, address: str) -> None:
        print(f"torchcaps explore: {address}", flush=True)
        if not self.no_browser:
            import threading
            import webbrowser

            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def _parts() -> tuple[
    Callable[[Shelf, str, int, Callable[[str], object]], None],
    Callable[[tuple[Path, ...], Path | None], Shelf],
    Callable[[str], bool],
]:
    """What the command needs of the explorer, or one line that says what must be installed."""
    from torchcaps.errors import RecipeError

    try:
        from torchcaps.explore.guards import is_loopback
        from torchcaps.explore.server import serve
        from torchcaps.explore.shelf import find_shelf
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in ("starlette", "uvicorn", "h11", "anyio"):
            raise
        raise RecipeError(f'explore needs {missing.name}: pip install "torchcaps[explore]"') from None
    return serve, find_shelf, is_loopback
