"""The explorer's page in a real browser: drawn on, moved, stepped through, shared and refused.

One headless Chromium and one server for all tests; each opens a page of its own, which must ask nobody else for
anything and say nothing on the console. Skipped without Playwright or a Chromium on the path.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested with Playwright: pip install playwright"
)
pytest.importorskip("starlette", reason="the explorer needs the extra `explore`")
pytest.importorskip("uvicorn", reason="the explorer needs the extra `explore`")

from support.explorer_server import Address, ask, served, tiny_run  # noqa: E402
from torchcaps.explore.middleware import MAX_BODY  # noqa: E402
from torchcaps.explore.run_registry import find_runs  # noqa: E402
from torchcaps.systems import system_of  # noqa: E402
from torchcaps.train.run import load_run, shipped_models  # noqa: E402
from torchcaps.zoo import model_card  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: apt-get install chromium")

ROOT = Path(__file__).parents[2]
PATIENCE = 30_000
"""Milliseconds a busy machine may take for one step."""
MATRIX = {"name": "matrix", "sizes": [4, 2, 2, 2], "kernel": 3, "capsule_strides": [1, 1]}
SPARSE = {
    "name": "sparse", "channels": 4, "kernel": 5, "types": 2, "type_dimension": 4, "primary_kernel": 5,
    "dimension": 4, "decoder": [8], "capsules": 6,
}  # fmt: skip
POE = {
    "name": "poe",
    "capsules": 5,
    "dimension": 4,
    "child_dimension": 4,
    "autoencoder": {"channels": [8, 8], "kernel": 3},
}
ONE = [[(0.52, 0.15), (0.48, 0.85)]]
FOUR = [[(0.35, 0.15), (0.28, 0.5), (0.72, 0.5)], [(0.62, 0.2), (0.58, 0.88)]]
"""Strokes, in shares of the surface."""


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[Address]:
    root = tmp_path_factory.mktemp("runs")
    tiny_run(root / "glyphs")
    tiny_run(root / "matrix", model=MATRIX)
    tiny_run(root / "sparse", model=SPARSE)
    tiny_run(root / "demo" / "poe", model=POE)
    registry = find_runs([], root=root)
    if not registry.entries[0].shipped:
        pytest.skip("this copy of the package comes without its trained run")
    with served(registry) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    sync_api.expect.set_options(timeout=PATIENCE)
    with sync_api.sync_playwright() as playwright:
        root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=[*root, "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser, address) -> Iterator[Callable[..., sync_api.Page]]:
    """Open the page; at the end nothing foreign was asked for and nothing was said on the console."""
    asked: list[str] = []
    said: list[str] = []
    contexts = []

    def open_page(hash_: str = "#run=capsnet-digits", *, answered: bool = True, **wishes) -> sync_api.Page:
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **wishes})
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"{address.url}/{hash_}")
        if answered:
            _answered(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    foreign = [url for url in asked if not url.startswith((f"{address.url}/", "data:", "blob:"))]
    assert not foreign
    assert not said


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def live_site(tmp_path):
    """A plain file server of the page and its weights, as the site has them."""
    shutil.copytree(ROOT / "docs" / "live", tmp_path / "live")
    for name in ("capsnet-digits", "poe-mnist"):
        shutil.copyfile(shipped_models()[name] / "model.safetensors", tmp_path / "live" / f"{name}.safetensors")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _by(page: sync_api.Page, name: str) -> sync_api.Locator:
    return page.get_by_test_id(name)


def _answered(page: sync_api.Page) -> None:
    sync_api.expect(_by(page, "answer")).not_to_have_text("–")
    sync_api.expect(_by(page, "page")).to_have_attribute("aria-busy", "false")


def _pixels(page: sync_api.Page, name: str) -> str:
    return str(_by(page, name).evaluate("canvas => canvas.toDataURL()"))


def _eventually(page: sync_api.Page, ready: Callable[[], bool], what: str) -> None:
    for _ in range(PATIENCE // 50):
        if ready():
            return
        page.wait_for_timeout(50)
    raise AssertionError(what)


@contextmanager
def _changes(page: sync_api.Page, *names: str) -> Iterator[None]:
    """What is done in the block changes these canvases."""
    before = {name: _pixels(page, name) for name in names}
    yield
    for name in names:
        _eventually(page, lambda name=name: _pixels(page, name) != before[name], f"{name} stayed as it was")


def _draw(page: sync_api.Page, strokes: list[list[tuple[float, float]]]) -> None:
    _by(page, "source-draw").check(force=True)
    place = _by(page, "surface").bounding_box()
    assert place is not None
    spots = [[(place["x"] + x * place["width"], place["y"] + y * place["height"]) for x, y in one] for one in strokes]
    for first, *others in spots:
        page.mouse.move(*first)
        page.mouse.down()
        for spot in others:
            page.mouse.move(*spot, steps=5)
        page.mouse.up()


def _open(page: sync_api.Page, tab: str) -> None:
    _by(page, f"tab-{tab}").click()
    sync_api.expect(_by(page, f"panel-{tab}")).to_be_visible()


def _png(side: int, ink: Callable[[int, int], bool]) -> bytes:
    """A PNG, black on white."""
    rows = b"".join(b"\0" + bytes(0 if ink(x, y) else 255 for x in range(side)) for y in range(side))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("digit", "strokes"), [("1", ONE), ("4", FOUR)])
def test_a_drawn_digit_lights_its_capsule_up(visit, digit, strokes):
    page = visit()
    _draw(page, strokes)
    sync_api.expect(_by(page, "answer")).to_have_text(digit)
    sync_api.expect(_by(page, f"capsule-{digit}")).to_have_class(re.compile("wins"))
    lengths = [float(_by(page, f"capsule-{j}").get_attribute("data-value")) for j in range(10)]
    assert lengths[int(digit)] == max(lengths) > 0.5
    assert _by(page, "live").get_attribute("aria-live") == "polite"
    _by(page, "clear").click()
    sync_api.expect(_by(page, "hint")).to_be_visible()


def test_the_front_page_offers_every_model_and_opens_it(visit, address):
    page = visit(answered=False, hash_="")
    shipped = [run["name"] for run in ask(address, "GET", "/api/runs")[2]["runs"] if run["shipped"]]
    sync_api.expect(page.locator(".models .model-pictures")).to_have_count(len(shipped))
    for name in shipped:
        _by(page, f"model-{name}").click()
        sync_api.expect(_by(page, "run").locator("option:checked")).to_contain_text(name)
        _answered(page)
        assert page.evaluate("location.hash") != "#"
        _by(page, "to-home").click()
        sync_api.expect(_by(page, "home")).to_be_visible()
    _by(page, "own-matrix").click()
    _answered(page)
    sync_api.expect(_by(page, "home")).to_be_hidden()


def test_the_tour_has_six_steps(visit):
    page = visit(answered=False, hash_="")
    _by(page, "tour-start").click()
    for step in range(1, 7):
        sync_api.expect(_by(page, "tour-count")).to_have_text(f"step {step} of 6")
        _answered(page)
        sync_api.expect(page.locator(".looked-at")).to_have_count(1)
        sync_api.expect(_by(page, "trouble")).to_be_hidden()
        _by(page, "tour-next").click()
    sync_api.expect(_by(page, "tour")).to_be_hidden()


def test_a_blank_picture_is_no_digit_and_children_that_stay_undecided_are_called_so(visit):
    page = visit("#run=capsnet-digits&tab=routing")
    sync_api.expect(_by(page, "entropy-now")).to_contain_text("undecided")
    _by(page, "source-draw").check(force=True)
    sync_api.expect(_by(page, "answer")).to_have_text("nothing")


def test_disturbing_changes_the_input(visit):
    page = visit()
    with _changes(page, "model-input", "parents-input", "parents-drawn"):
        _by(page, "rotate").fill("40")
    with _changes(page, "model-input"):
        _by(page, "new-noise").click()
    _by(page, "reset-changes").click()
    sync_api.expect(_by(page, "rotate")).to_have_value("0")


def test_a_slider_and_the_pad_redraw_the_picture(visit):
    page = visit("#tab=instantiation")
    _eventually(page, lambda: page.locator(".strip").count() == 16, "no strips")
    with _changes(page, "drawn"):
        _by(page, "number-3").evaluate("x => { x.value = x.max; x.dispatchEvent(new Event('input')); }")
    sync_api.expect(_by(page, "reset")).to_be_enabled()
    with _changes(page, "drawn"):
        _by(page, "pad").focus()
        for _ in range(4):
            page.keyboard.press("Shift+ArrowRight")
    share = "x => (x.value - x.min) / (x.max - x.min)"  # four steps of a tenth from the middle
    _eventually(page, lambda: abs(_by(page, "number-0").evaluate(share) - 0.9) < 0.03, "the slider did not follow")
    with _changes(page, "drawn"):
        _by(page, "sample").click()
    _by(page, "reset").click()
    sync_api.expect(_by(page, "reset")).to_be_disabled()


def test_stepping_changes_the_heat_map(visit):
    page = visit("#tab=routing")
    sync_api.expect(_by(page, "step-said")).to_have_text("round 3 of 3")
    with _changes(page, "heat", "votes-canvas", "agreement-canvas"):
        _by(page, "step-back").click()
    with _changes(page, "heat"):
        page.keyboard.press(",")
    sync_api.expect(_by(page, "step-said")).to_have_text("round 1 of 3")
    with _changes(page, "heat"):
        _by(page, "step").fill("3")
    with _changes(page, "votes-canvas"):
        _by(page, "heat").click(position={"x": 20, "y": 20})
    sync_api.expect(_by(page, "followed")).to_contain_text("row 1, column 1")
    with _changes(page, "heat"):
        _by(page, "parent").select_option("2")


def test_switching_runs_and_models_without_a_decoder(visit):
    page = visit()
    _by(page, "run").select_option(label="matrix")
    sync_api.expect(_by(page, "about")).to_contain_text("16×16")
    sync_api.expect(_by(page, "blind")).to_be_visible()
    _open(page, "instantiation")
    sync_api.expect(_by(page, "undrawable")).to_be_visible()
    sync_api.expect(page.locator(".cell")).to_have_count(16)
    _open(page, "samples")
    sync_api.expect(_by(page, "samples-unable")).to_contain_text("no decoder")
    _open(page, "routing")
    sync_api.expect(_by(page, "histogram-figure")).to_be_visible()
    _by(page, "run").select_option(label="glyphs")
    sync_api.expect(_by(page, "about")).to_contain_text("CapsNet")
    sync_api.expect(_by(page, "histogram-figure")).to_be_hidden()


@pytest.mark.parametrize(
    ("run", "about", "capsules", "rounds"),
    [("sparse", "sparse capsules", 6, 3), ("demo/poe", "products of experts", 5, 1)],
)
def test_every_panel_shows_runs_without_classes(visit, run, about, capsules, rounds):
    page = visit(f"#run={run}")
    sync_api.expect(_by(page, "run").locator("option:checked")).to_have_text(run)
    sync_api.expect(_by(page, "about")).to_contain_text(about)
    sync_api.expect(page.locator(".capsules .capsule")).to_have_count(capsules)
    sync_api.expect(_by(page, "answer")).to_contain_text(re.compile("capsule|mostly"))
    _open(page, "routing")
    sync_api.expect(_by(page, "step-said")).to_have_text(f"round {rounds} of {rounds}")
    assert _by(page, "play").is_visible() == (rounds > 1)
    with _changes(page, "votes-canvas"):
        _by(page, "heat").click(position={"x": 20, "y": 20})
    _open(page, "instantiation")
    _eventually(page, lambda: page.locator(".strip").count() == 4, "no strips")
    _by(page, "sample").click()
    sync_api.expect(_by(page, "whose")).to_have_text("as you have set it")
    sync_api.expect(_by(page, "instantiation-error")).to_be_hidden()
    _open(page, "samples")
    _eventually(page, lambda: page.locator(".sample-grid .thumb").count() >= 4, "no samples")
    sync_api.expect(_by(page, "samples-error")).to_be_hidden()
    sync_api.expect(_by(page, "trouble")).to_be_hidden()


def test_the_samples_open_what_is_chosen(visit):
    page = visit("#tab=samples&count=2")
    sync_api.expect(page.locator(".sample-grid .thumb")).to_have_count(20)
    _by(page, "samples-0-0").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.testid") == "samples-1-1"
    page.keyboard.press("Enter")
    sync_api.expect(_by(page, "panel-instantiation")).to_be_visible()
    sync_api.expect(_by(page, "capsule")).to_have_value("1")
    sync_api.expect(_by(page, "whose")).to_have_text("as you have set it")


FIRST = {
    "capsnet": "apart-a-said",
    "matrix": "belief-0",
    "poe": "wall-0-0",
    "sparse": "competitor-0",
}
"""What the first panel of each system shows when it is complete."""
READY = {
    "parents": ".capsule.wins",
    "routing": "[data-testid=step-said]:not(:empty)",
    "instantiation": ".strip, .cell",
    "samples": ".sample-grid .thumb, [data-testid=samples-unable]:not([hidden])",
    "routers": "[data-testid=router-b-bars] .capsule",
    "compare": "[data-testid=b-answer]",
}
"""The same of the other panels."""
TOO_WIDE = """() => [...document.querySelectorAll("main *")].filter(x => x.offsetParent
    && !x.closest(".visually-hidden, .tabs, .sample-scroll")
    && x.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(x => x.outerHTML.slice(0, 99))"""
"""Elements that reach over the page's right edge, where no part of the page can be scrolled to them."""


@pytest.mark.parametrize("model", sorted(shipped_models()))
def test_every_panel_of_every_shipped_model_fits_a_desktop_and_a_phone_light_and_dark(visit, model):
    page = visit(f"#run={model}&tab=lead&example=1", color_scheme="light")
    kind = model_card(model).system
    for tab in ("lead", *READY):
        if not _by(page, f"tab-{tab}").is_visible():
            assert (kind, tab) == ("poe", "routers")
            continue
        _open(page, tab)
        ready = f"[data-testid={FIRST[kind]}]" if tab == "lead" else READY[tab]
        page.locator(ready).first.wait_for(state="attached")
        for width, theme in ((1280, "light"), (1280, "dark"), (360, "dark"), (360, "light")):
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=theme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (tab, width)
            assert not page.evaluate(TOO_WIDE), (tab, width)
        sync_api.expect(page.locator(".trouble:visible, .banner:visible")).to_have_count(0)


def test_the_wall_is_walked_opened_and_turned(visit):
    page = visit("#run=poe-mnist&tab=lead&example=3")
    wall = _by(page, "wall")
    _eventually(page, lambda: wall.locator(".thumb").count() == 160, "no wall")
    # What the experts stand for, in words, and who is off in this picture
    sync_api.expect(wall).to_contain_text("mostly twos")
    sync_api.expect(wall.locator(".wall-column.wins")).to_have_count(1)
    assert wall.locator(".wall-column.off").count() >= 10
    sync_api.expect(_by(page, "answer")).to_have_text("mostly twos")
    sync_api.expect(_by(page, "wall-title")).to_have_text("mostly twos")
    _by(page, "wall-more").click()
    _eventually(page, lambda: wall.locator(".thumb").count() == 320, "no more rows")
    with _changes(page, "wall-drawn"):
        _by(page, "wall-2-7").click()
    with _changes(page, "wall-drawn"):
        _by(page, "frame-slant").fill("0.7")
    with _changes(page, "wall-drawn"):
        _by(page, "wall-as-input").click()
    _by(page, "wall-numbers").click()
    sync_api.expect(_by(page, "panel-instantiation")).to_be_visible()
    sync_api.expect(_by(page, "capsule")).to_have_value("7")


def test_the_competition_says_who_wins_and_why(visit, address):
    page = visit("#run=sparse-digits&tab=lead&example=3")
    sync_api.expect(page.locator(".competitor")).to_have_count(16)
    ranks = page.locator(".competitor").evaluate_all("all => all.map(x => Number(x.dataset.rank))")
    assert ranks == list(range(16))
    sync_api.expect(_by(page, "competition-why")).to_have_text(re.compile("comes first.*support.*reach the decoder"))
    silent = page.locator(".competitor.silent").count()
    assert 0 < silent < 16
    before = _by(page, "competition-why").inner_text()
    _by(page, "noise").fill("0.5")
    _eventually(page, lambda: _by(page, "competition-why").inner_text() != before, "the competition did not follow")


def test_a_toy_is_turned_while_beliefs_and_votes_follow(visit):
    page = visit("#run=matrix-smallnorb&tab=lead&example=12")
    sync_api.expect(page.locator(".belief")).to_have_count(5)
    sync_api.expect(_by(page, "eyes").locator("canvas")).to_have_count(2)
    assert page.locator(".belief.wins .beliefs-tiles canvas").count() > 0
    with _changes(page, "belief-canvas"):
        _by(page, "turn-azimuth").fill("2")
    sync_api.expect(page.locator(".belief.wins")).to_have_count(1)


def test_two_digits_over_each_other_are_pulled_apart(visit):
    page = visit("#run=capsnet-digits&tab=lead&example=2")
    sync_api.expect(_by(page, "apart-said")).to_contain_text("One thing")
    with _changes(page, "apart-input", "apart-both", "model-input"):
        page.locator(".seconds .thumb").nth(1).click()
    sync_api.expect(_by(page, "apart-said")).to_contain_text("It sees")
    _by(page, "apart-none").click()
    sync_api.expect(_by(page, "apart-said")).to_contain_text("One thing")


def test_of_a_pair_both_digits_are_named(visit):
    page = visit("#run=capsnet-multimnist&tab=lead&example=1")
    sync_api.expect(_by(page, "answer")).to_have_text(re.compile(r"^\d and \d$"))
    sync_api.expect(_by(page, "answer-more")).to_contain_text(re.compile("right|the label is"))
    sync_api.expect(_by(page, "apart-said")).to_contain_text("It sees")
    sync_api.expect(_by(page, "apart-second")).to_be_hidden()


def test_two_routers_route_the_same_votes(visit):
    page = visit("#run=capsnet-digits&tab=routers&example=7")
    sync_api.expect(_by(page, "routers-verdict")).to_have_text(re.compile("Both say|They differ"))
    sync_api.expect(_by(page, "router-a-answer")).to_have_text(_by(page, "answer").inner_text())
    with _changes(page, "router-a-canvas", "router-b-canvas"):
        _by(page, "routers-step").fill("1")
    with _changes(page, "router-b-canvas"):
        _by(page, "router-b").select_option("attention")
    sync_api.expect(_by(page, "routers-error")).to_be_hidden()
    # Where routing is part of the energy, there is no other
    _by(page, "run").select_option(label="demo/poe")
    sync_api.expect(_by(page, "about")).to_contain_text("products of experts")
    sync_api.expect(_by(page, "tab-routers")).to_be_hidden()


@pytest.mark.parametrize(
    ("run", "other", "words"),
    [
        ("capsnet-digits", "poe-mnist", r"capsnet-digits says 0\. The strongest capsule of poe-mnist: mostly zeros\."),
        ("capsnet-multimnist", "capsnet-digits", r"They differ: \d and \d and \d\.|Both say"),
        ("matrix-smallnorb", "capsnet-digits", "knows other classes than matrix-smallnorb"),
    ],
)
def test_the_verdict_on_two_models_says_no_more_than_they_do(visit, run, other, words):
    page = visit(f"#run={run}&tab=compare&example={3 if run == 'capsnet-digits' else 1}&with={other}")
    sync_api.expect(_by(page, "verdict")).to_have_text(re.compile(words))


def test_two_runs_are_compared_on_one_picture(visit):
    page = visit("#run=poe-mnist&tab=compare")
    # At first with a model of the same data
    sync_api.expect(_by(page, "other").locator("option:checked")).to_have_text("capsnet-digits")
    page = visit("#tab=compare")
    _by(page, "other").select_option(label="glyphs")
    sync_api.expect(_by(page, "a-answer")).to_have_text("7")
    sync_api.expect(_by(page, "compare-b")).to_contain_text("16×16")
    sync_api.expect(_by(page, "verdict")).to_have_text(re.compile("Both say|They differ"))


def test_a_link_holds_the_state(visit):
    page = visit()
    _draw(page, FOUR)
    sync_api.expect(_by(page, "answer")).to_have_text("4")
    _by(page, "dx").fill("2")
    _open(page, "routing")
    _by(page, "step-back").click()
    _by(page, "parent").select_option("9")
    page.wait_for_url(re.compile("image=.*parent=9"))
    page.wait_for_timeout(300)
    again = visit(page.url[page.url.index("#") :])
    sync_api.expect(_by(again, "panel-routing")).to_be_visible()
    sync_api.expect(_by(again, "parent")).to_have_value("9")
    sync_api.expect(_by(again, "step-said")).to_have_text("round 2 of 3")
    sync_api.expect(_by(again, "dx")).to_have_value("2")
    sync_api.expect(_by(again, "answer")).to_have_text("4")
    assert _pixels(again, "model-input") == _pixels(page, "model-input")


def test_nonsense_in_a_link_is_left_out(visit):
    page = visit("#run=none&tab=x&image=1.2.3.zzz&pose=1_2&capsule=99&step=1e9&place=9.9.9&rotate=NaN&axes=40.2")
    sync_api.expect(_by(page, "panel-parents")).to_be_visible()
    sync_api.expect(_by(page, "trouble")).to_be_hidden()
    assert _by(page, "answer").inner_text() == "7"


def test_a_pose_beyond_all_bounds_is_left_out_of_a_link(visit):
    page = visit(f"#tab=instantiation&capsule=1&pose=1e300{'_0' * 15}")
    sync_api.expect(_by(page, "capsule")).to_have_value("1")
    sync_api.expect(_by(page, "reset")).to_be_disabled()
    sync_api.expect(_by(page, "instantiation-error")).to_be_hidden()


def test_ones_own_picture_is_read_in_the_browser(visit):
    page = visit()
    bar = _png(90, lambda x, y: 50 < x < 58 and 10 < y < 70)  # a one, dark on white, not in the middle
    _by(page, "source-picture").check(force=True)
    _by(page, "file").set_input_files({"name": "one.png", "mimeType": "image/png", "buffer": bar})
    sync_api.expect(_by(page, "invert")).to_be_checked()
    with _changes(page, "model-input"):
        _by(page, "center-picture").check()
    sync_api.expect(_by(page, "answer")).to_have_text("1")
    with _changes(page, "model-input"):
        _by(page, "invert").uncheck()
    _by(page, "file").set_input_files({"name": "no.png", "mimeType": "image/png", "buffer": b"no picture"})
    sync_api.expect(_by(page, "picture-name")).to_contain_text("no.png is no picture")


@pytest.mark.parametrize("kind", ["png", "svg", "json"])
def test_what_is_shown_can_be_saved(visit, kind):
    page = visit()
    _by(page, "save-menu").locator("summary").click()
    with page.expect_download() as download:
        _by(page, f"save-{kind}").click()
    assert download.value.suggested_filename == f"capsnet-digits-parents.{kind}"
    data = download.value.path().read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<svg ", "json": b"{"}[kind])
    if kind == "json":
        assert json.loads(data)["winner"] == 7


def test_the_saved_numbers_of_routing_are_the_models_own(visit, address):
    page = visit("#tab=routing")
    sync_api.expect(_by(page, "step-said")).to_have_text("round 3 of 3")
    _by(page, "save-menu").locator("summary").click()
    with page.expect_download() as download:
        _by(page, "save-json").click()
    saved = json.loads(download.value.path().read_bytes())
    body = {"image": saved["image"], "parent": saved["parent"]}
    answer = ask(address, "POST", "/api/runs/0/routing", body)[2]
    assert saved["peak"] == answer["peak"] and saved["entropy"] == answer["entropy"]
    maps = [round(255 * x) for one in saved["maps"] for x in one]
    assert maps == list(base64.b64decode(answer["maps"]["data"]))


def test_dark_and_light(visit):
    page = visit(color_scheme="dark")
    shade = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(shade)
    _by(page, "theme").click()
    light = page.evaluate(shade)
    assert [sum(map(int, re.findall(r"\d+", color))) > 3 * 128 for color in (dark, light)] == [False, True]
    page.reload()
    _answered(page)
    assert page.evaluate(shade) == light


def test_a_phone_scrolls_one_way_only(visit):
    page = visit(viewport={"width": 360, "height": 740}, has_touch=True)
    for tab in ("lead", "parents", "routing", "instantiation", "samples", "routers", "compare"):
        _by(page, f"tab-{tab}").click()
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, tab


def test_the_keyboard_reaches_every_panel(visit):
    page = visit()
    _by(page, "tab-parents").focus()
    for tab in ("routing", "instantiation", "samples", "routers", "compare"):
        page.keyboard.press("ArrowRight")
        sync_api.expect(_by(page, f"panel-{tab}")).to_be_visible()
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, select, input, canvas[tabindex]")].filter(x =>
            !x.textContent.trim() && !x.labels?.length && !x.getAttribute("aria-label")).map(x => x.outerHTML)"""
    )
    assert not unnamed


def test_a_server_that_is_busy_or_gone(browser, address):
    """503 is asked again and not spoken of; no answer at all is said, and the page goes on when it is back."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    refusals = iter([True, True])
    busy = {"status": 503, "headers": {"Retry-After": "1"}, "json": {"error": "busy"}}
    page.route("**/infer", lambda route: route.fulfill(**busy) if next(refusals, False) else route.continue_())
    page.goto(f"{address.url}/#run=capsnet-digits")
    _answered(page)
    sync_api.expect(_by(page, "trouble")).to_be_hidden()
    page.route("**/api/**", lambda route: route.abort())
    _by(page, "rotate").fill("20")
    sync_api.expect(_by(page, "gone")).to_be_visible()
    page.unroute("**/api/**")
    sync_api.expect(_by(page, "gone")).to_be_hidden()
    context.close()


def test_foreign_hosts_and_large_bodies_are_refused(address):
    assert ask(address, "GET", "/", headers={"Host": "capsules.example"})[0] == 400
    assert ask(address, "POST", "/api/runs/0/infer", b" " * (MAX_BODY + 1))[0] == 413
    assert ask(address, "GET", "/static/main.js")[0] == 200
    assert ask(address, "GET", "/static/../__init__.py")[0] == 404


def test_the_page_without_a_server_computes_what_python_does(browser, live_site):
    """Of `docs/live`: lengths in every round, poses and drawings to 1e-3; no foreign request, a silent console."""
    run = load_run("capsnet-digits")
    images = run.extra["examples.images"][:2] / 255
    with torch.no_grad():
        out = run.model(images, trace=True)
        drawn = run.model.reconstruct(out.classes)
    asked: list[str] = []
    said: list[str] = []
    context = browser.new_context(viewport={"width": 360, "height": 740})
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{live_site}/live/index.html")
    page.wait_for_selector("body[data-ready]", timeout=PATIENCE)
    for n in range(2):
        found = page.evaluate("n => { takeExample(n); return window.found; }", n)
        expected = {"lengths": out.info.parents.activation[:, n], "pose": out.classes.pose[n], "drawn": drawn[n]}
        for name, value in expected.items():
            torch.testing.assert_close(
                torch.tensor(found[name]), value.reshape(torch.tensor(found[name]).shape), atol=1e-3, rtol=0
            )
        sync_api.expect(page.locator("#answer")).to_have_text(str(int(out.classes.activation[n].argmax())))
    # An expert in a frame
    experts = load_run("poe-mnist").model
    view = system_of(experts.config).explore(experts)
    frame = (0.8, 0.5, 2.0, -1.5)
    for j, n in ((0, 0), (7, 3), (19, 5)):
        place = dict(zip(view.frame.names, frame, strict=True))
        found = page.evaluate("([j, n, place]) => { takeExpert(j, n, place); return window.expert; }", [j, n, place])
        drawn = view.draw(j, experts.decoder.examples_of(j)[n], frame)
        torch.testing.assert_close(torch.tensor(found["drawing"]), drawn.flatten(), atol=1e-3, rtol=0)
        assert float(drawn.max()) > 0.5
    sync_api.expect(page.locator("#wall .tile")).to_have_count(80)
    page.locator("#clear").click()
    sync_api.expect(page.locator("#answer")).to_have_text("nothing yet")
    place = page.locator("#surface").bounding_box()
    page.mouse.move(place["x"] + 0.5 * place["width"], place["y"] + 0.15 * place["height"])
    page.mouse.down()
    page.mouse.move(place["x"] + 0.48 * place["width"], place["y"] + 0.85 * place["height"], steps=5)
    page.mouse.up()
    sync_api.expect(page.locator("#answer")).to_have_text("1")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    slider = page.locator("#frame-slant").bounding_box()
    assert slider is not None and slider["width"] > 150  # wide enough for a finger
    context.close()
    assert not said and all(url.startswith((live_site, "data:")) for url in asked)
