"""torchcaps explore"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchcaps.cli.next_steps import suggest_next

__all__ = ["Explore"]


@dataclass(frozen=True)
class Explore:
    """Explore capsule networks in the browser: activations, routing, and images decoded from any pose.

    Example: torchcaps explore runs/capsnet-mnist-small-0 --no-browser

    The models that ship with the package (`torchcaps zoo`) are always offered; without a run, also those in ./runs and
    one level deeper. Ctrl-C ends it.
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Folders of runs, folders that contain runs, or names of shipped models; they are offered first."""
    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own lets others in."""
    port: int = 0
    """Port to listen on; 0 is a free one."""
    no_browser: bool = False
    """Print the address only."""
    data_dir: Path | None = None
    """Folder to search for the runs' test images, before TORCHCAPS_DATA and the cache."""

    def run(self) -> int:
        """Serve the page until interrupted; return the exit code."""
        from torchcaps.errors import RecipeError

        # The server's libraries are an extra
        try:
            from torchcaps.explore.server import serve
        except ModuleNotFoundError as missing:
            if missing.name not in ("starlette", "uvicorn"):
                raise
            raise RecipeError(f'the explorer needs {missing.name}: pip install "torchcaps[explore]"') from None
        from torchcaps.explore.run_registry import find_runs

        try:
            serve(find_runs(self.runs, self.data_dir), self.host, self.port, self._ready)
        except KeyboardInterrupt:
            print("torchcaps explore: ended", file=sys.stderr)
            suggest_next("list")
        return 0

    def _ready(self, address: str) -> None:
        """Print the page's address, warn if others can reach it, and open a browser."""
        from torchcaps.explore.middleware import is_loopback

        print(f"torchcaps explore: {address}", flush=True)
        if not is_loopback(self.host):
            print(
                f"torchcaps: --host {self.host} lets every machine that reaches this one use the explorer, unencrypted "
                "and without a password",
                file=sys.stderr,
            )
        if not self.no_browser:
            import threading
            import webbrowser

            # In a thread: some browsers return only when they are closed
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
