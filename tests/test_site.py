"""The documentation site: builds without a warning, documents every public name, links and searches offline."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
API = sorted(path.stem for path in (ROOT / "docs" / "api").glob("*.md") if path.stem not in {"index", "torchcaps"})
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TEN_PAGES = (
    "index",
    "start/sixty-seconds",
    "start/faq",
    "gallery/tutorials/plot_1_capsules_from_scratch",
    "gallery/examples/index",
    "how-to/resume",
    "systems/capsnet",
    "results/index",
    "api/routing",
    "develop/new_router",
)


def public_names(module: str) -> list[str]:
    return [f"{module}.{name}" for name in importlib.import_module(module).__all__ if not name.startswith("__")]


def test_every_module_with_public_names_has_a_page():
    sources = [*(ROOT / "src" / "torchcaps").glob("*/__init__.py"), *(ROOT / "src" / "torchcaps").glob("*.py")]
    public = {p.parent.name if p.name == "__init__.py" else p.stem for p in sources if "\n__all__" in p.read_text()}
    assert public - {"torchcaps", "cli"} == set(API)


@pytest.mark.parametrize("module", API)
def test_public_functions_state_arguments_and_results(module):
    """Google sections, as the API pages show them; what returns nothing needs no "Returns:"."""
    loaded = importlib.import_module(f"torchcaps.{module}")
    for name in loaded.__all__:
        thing = getattr(loaded, name)
        if not inspect.isfunction(thing):
            continue
        text = inspect.getdoc(thing) or ""
        signature = inspect.signature(thing)
        assert not signature.parameters or "Args:" in text, f"{module}.{name}: no Args:"
        returns = str(signature.return_annotation) != "None" and signature.return_annotation is not None
        stated = "Returns:" in text or text.startswith("Return ")
        assert not returns or stated, f"{module}.{name}: no Returns:"


@pytest.mark.parametrize("module", ["layers", "models"])
def test_modules_say_what_their_forward_pass_computes(module):
    """Without a docstring of its own, `forward` shows that of torch."""
    loaded = importlib.import_module(f"torchcaps.{module}")
    classes = [thing for thing in map(loaded.__dict__.get, loaded.__all__) if inspect.isclass(thing)]
    passes = {thing: vars(thing)["forward"] for thing in classes if "forward" in vars(thing)}
    assert passes and all(forward.__doc__ for forward in passes.values())


def build(folder: Path) -> Path:
    """Build the site from a copy, so that the gallery of this tree stays, and without running the gallery."""
    from sphinx.cmd.build import main

    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("_build", "gallery"))
    for name in ("examples", "src"):
        (folder / name).symlink_to(ROOT / name)
    # Copied: links of an included page are resolved from where its file really lies
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copyfile(ROOT / name, folder / name)
    site = folder / "site"
    words = ["-W", "--keep-going", "-q", "-b", "html", "-D", "plot_gallery=0", str(folder / "docs"), str(site)]
    assert main(words) == 0
    return site


def inventory(site: Path) -> set[str]:
    """Names that the API pages document."""
    data = (site / "objects.inv").read_bytes()
    body = zlib.decompress(data.split(b"zlib.\n", 1)[1]).decode()
    return {line.split(" ")[0] for line in body.splitlines()}


def dead_links(site: Path) -> Iterator[str]:
    """Yield every link to a file or an anchor that is not there, and every file that is loaded from another host."""
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    for page, text in pages.items():
        for kind, target in re.findall(r'<(a|img|script|link)\b[^>]*?\s(?:href|src)="([^"]*)"', text):
            if re.match(r"https?:|//", target):
                if kind != "a":
                    yield f"{page.relative_to(site)} loads {target}"
                continue
            if target.startswith(("mailto:", "data:")):
                continue
            name, _, anchor = unquote(target).partition("#")
            path = (page.parent / name.partition("?")[0]).resolve() if name else page
            if not path.exists():
                yield f"{page.relative_to(site)} -> {target}"
            elif anchor and path in anchors and anchor not in anchors[path]:
                yield f"{page.relative_to(site)} -> {target}: no such anchor"


def check_notebooks(site: Path) -> None:
    """Every tutorial and example has a page with a link to a notebook that contains its code."""
    programs = [*(ROOT / "docs" / "tutorials").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    assert programs
    for program in programs:
        [notebook] = site.rglob(f"{program.stem}.ipynb")
        cells = json.loads(notebook.read_text())["cells"]
        code = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        imports = [line for line in program.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert imports and all(line in code for line in imports)
        folder = "tutorials" if program.parent.name == "tutorials" else "examples"
        page = (site / "gallery" / folder / f"{program.stem}.html").read_text()
        assert notebook.name in page


def browse(site: Path) -> None:
    """Open ten pages and search, in a browser that must ask no other host for anything."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        errors: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        for name in TEN_PAGES:
            page.goto((site / f"{name}.html").as_uri())
            assert page.locator("h1").first.inner_text()
        page.goto((site / "search.html").as_uri() + "?q=squash")
        page.wait_for_selector("#search-results li a", timeout=30_000)
        assert page.locator("#search-results li a").count() > 3
        browser.close()
    assert not errors
    assert all(url.startswith(("file:", "data:")) for url in asked)


def test_the_site_builds_links_searches_and_documents_every_public_name(tmp_path):
    pytest.importorskip("sphinx_gallery", reason="the site needs the extra `docs`")
    site = build(tmp_path)
    assert not list(dead_links(site))
    missing = {name for module in API for name in public_names(f"torchcaps.{module}")} - inventory(site)
    assert not missing, f"{missing}: tables and annotations are described in docs/api by py:data"
    shown = (site / "api" / "torchcaps.html").read_text()
    assert all(name.rpartition(".")[2] in shown for name in public_names("torchcaps"))
    check_notebooks(site)
    if CHROMIUM is not None:
        browse(site)
