"""Take screenshots of the explorer for the docs: the front page, each panel, and a view of each system, light and dark.

    python experiments/screenshots.py [RUN ...] [--data-dir DIR]

They are docs/pictures/explore-NAME-THEME.png. Without a run, the models that ship and those under ./runs.
Needs Playwright, and a Chromium on the path.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from torchcaps.utils.files import write_atomically

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH = 900
SCALE = 1.25
"""Width of a picture in pixels, and how many pixels of the browser's window make one: the page is for desktops."""
COLORS = 224
TIMEOUT = 60_000
LINKS = {
    "home": "",
    "parents": "run=capsnet-digits&tab=parents&example=7",
    "routing": "run=capsnet-digits&tab=routing&example=7&step=3&place=2.3",
    "instantiation": "run=capsnet-digits&tab=instantiation&example=1&axes=1.6",
    "samples": "run=capsnet-digits&tab=samples&count=6",
    "compare": "run=capsnet-digits&tab=compare&example=7&with=poe-mnist",
    "routers": "run=capsnet-digits&tab=routers&example=7",
    "experts": "run=poe-mnist&tab=lead&example=3",
    "competition": "run=sparse-digits&tab=lead&example=0",
    "beliefs": "run=matrix-smallnorb&tab=lead&example=38",
    "apart": "run=capsnet-multimnist&tab=lead&example=1",
}
READY = {
    "home": ".model",
    "routers": "[data-testid=router-b-bars] .capsule",
    "experts": ".wall .thumb",
    "competition": ".competitor",
    "beliefs": ".belief",
    "apart": "[data-testid=apart-a-said]:not(:empty)",
    "parents": ".capsule.wins",
    "routing": ".heats .thumb",
    "instantiation": ".strip",
    "samples": ".sample-grid .thumb",
    "compare": "[data-testid=b-answer], [data-testid=compare-lonely]:not([hidden])",
}


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--only", nargs="*", choices=LINKS, default=list(LINKS), help="names of pictures")
    asked = parser.parse_args(words)
    with explorer(asked.runs, asked.data_dir) as url, sync_playwright() as playwright:
        safe = [] if os.geteuid() else ["--no-sandbox"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=safe)
        for theme in ("light", "dark"):
            size = {"width": round(WIDTH * SCALE), "height": 900}
            page = browser.new_page(viewport=size, color_scheme=theme)
            page.set_default_timeout(TIMEOUT)
            for panel in asked.only:
                path = PICTURES / f"explore-{panel}-{theme}.png"
                write_atomically(path, [picture(page, url, panel)])
                print(path, path.stat().st_size)
        browser.close()


@contextmanager
def explorer(runs: list[Path], data_dir: Path | None) -> Iterator[str]:
    """Start the explorer on a free port; yields its address."""
    where = [] if data_dir is None else ["--data-dir", str(data_dir)]
    command = [sys.executable, "-m", "torchcaps", "explore", *map(str, runs), "--no-browser", *where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "the explorer did not start"
            yield found[0]
        finally:
            process.terminate()


def picture(page: Page, url: str, panel: str) -> bytes:
    """Capture the whole page at a link as PNG, scaled to the width of the docs, with a palette of few colors."""
    page.goto("about:blank")
    page.goto(f"{url}#{LINKS[panel]}")
    if panel != "home":
        expect(page.get_by_test_id("answer")).not_to_have_text("–", timeout=TIMEOUT)
    page.wait_for_selector(READY[panel])
    page.wait_for_timeout(300)
    expect(page.locator("body.busy")).to_have_count(0, timeout=TIMEOUT)  # the pad's field is drawn, too
    page.wait_for_timeout(600)
    shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    small = shot.resize((WIDTH, round(shot.height * WIDTH / shot.width)), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.quantize(COLORS, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE).save(
        out, "PNG", optimize=True
    )
    return out.getvalue()


if __name__ == "__main__":
    main()
