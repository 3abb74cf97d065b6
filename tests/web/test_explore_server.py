"""The explorer's routes: every question has its answer, and every wrong one its line."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.explorer_server import Address, ask, served, tiny_run
from support.small_models import SMALL, SPEC, built
from support.tiny_recipe import tiny
from torchcaps.cli import main
from torchcaps.data import Dataset
from torchcaps.errors import CheckpointError, DataError, RecipeError, ShapeError
from torchcaps.explore import handlers, routes, server
from torchcaps.explore.examples import Examples
from torchcaps.explore.handlers import ACTIONS, describe_run, get_example
from torchcaps.explore.messages import (
    DrawRequest,
    EncodedImage,
    RoutingRequest,
    decode_image,
    encode_images,
    parse_request,
    to_json,
)
from torchcaps.explore.run_registry import (
    FIRST_MODEL,
    MAX_OPEN,
    OpenRun,
    RunEntry,
    RunRegistry,
    find_runs,
    shipped_runs,
)
from torchcaps.models import MODELS
from torchcaps.systems import SYSTEMS, system_of
from torchcaps.train import TrainedRun

IMAGE = {"shape": [1, 16, 16], "data": base64.b64encode(bytes(range(256))).decode()}
POSE = [0.1, -0.2, 0.3, 0.4]
EXPLORABLE = [name for system in SYSTEMS.values() if system.explorer_view for name in system.models]
MATRIX = {"name": "matrix", "sizes": [4, 2, 2, 2], "kernel": 3, "capsule_strides": [1, 1]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three runs and one that is damaged."""
    root = tmp_path_factory.mktemp("runs")
    tiny_run(root / "a", about="glyphs")
    tiny_run(root / "b", model=MATRIX)
    tiny_run(root / "c", data={"name": "mnist", "data_dir": str(root)})
    (tiny_run(root / "d") / "checkpoint.safetensors").write_bytes(b"no")
    tiny_run(root / "e", model={"name": "cnn", "widths": [4], "kernel": 3, "hidden": [8]})
    return root


@pytest.fixture(scope="module")
def address(folders):
    # Without the shipped models, whose number may change
    with served(RunRegistry(find_runs([folders / name for name in "abcd"]).entries[:4])) as found:
        yield found


def get(address: Address, path: str):
    status, headers, answer = ask(address, "GET", path)
    assert status == 200, answer
    assert headers["content-type"].startswith("application/json")
    return answer


def post(address: Address, path: str, body: object):
    status, _, answer = ask(address, "POST", path, body)
    assert status == 200, answer
    return answer


def refused(address: Address, path: str, body: object, status: int = 400) -> str:
    found, _, answer = ask(address, "POST", path, body)
    assert found == status and set(answer) == {"error"} and "\n" not in answer["error"], answer
    return answer["error"]


def test_the_runs_are_listed_before_they_are_loaded(address):
    answer = get(address, "/api/runs")
    assert [(run["id"], run["name"], run["kind"]) for run in answer["runs"]] == [
        (0, "a", "capsnet"), (1, "b", "matrix"), (2, "c", "capsnet"), (3, "d", "capsnet"),
    ]  # fmt: skip
    assert not any(run["shipped"] for run in answer["runs"]) and answer["version"]
    get(address, "/api/runs/0")
    assert get(address, "/api/runs")["runs"][0]["loaded"] and not get(address, "/api/runs")["runs"][3]["loaded"]


def test_facts(address):
    facts = get(address, "/api/runs/0")
    expected = {
        "id": 0, "name": "a", "kind": "capsnet", "shape": [1, 16, 16], "names": list("0123456789"), "dimension": 4,
        "iterations": 3, "has_decoder": True, "domains": ["empirical"], "examples": 40, "source": "data",
        "about": "glyphs", "recipe": "tiny", "steps": 0, "classifies": True, "display": "unit",
    }  # fmt: skip
    assert {key: facts[key] for key in expected} == expected
    assert facts["children"] == 2 * facts["places"][0] * facts["places"][1] and facts["parameters"] > 100


def test_examples_are_those_of_the_data_or_drawn_by_code(address):
    from torchcaps.data import GlyphsConfig

    data = GlyphsConfig(train=1, test=40, size=16).load().test
    answer = get(address, "/api/runs/0/examples/7")
    assert base64.b64decode(answer["image"]["data"]) == data.images[7].numpy().tobytes()
    assert (answer["label"], answer["name"], answer["n"]) == (int(data.labels[7]), str(int(data.labels[7])), 7)
    assert get(address, "/api/runs/2")["source"] == "glyphs"
    assert get(address, "/api/runs/2/examples/199")["label"] in range(10)
    assert ask(address, "GET", "/api/runs/0/examples/40")[0] == 404


def test_infer(address):
    answer = post(address, "/api/runs/0/infer", {"image": IMAGE})
    assert set(answer) == {
        "activation",
        "winner",
        "pose",
        "reconstruction",
        "capsule_images",
        "silent",
        "nearest",
        "competition",
        "frame",
        "limits",
        "milliseconds",
    }
    assert len(answer["activation"]) == 10 and answer["winner"] == max(range(10), key=answer["activation"].__getitem__)
    assert torch.tensor(answer["pose"]).shape == (10, 4)
    assert answer["reconstruction"]["shape"] == [1, 16, 16] and answer["capsule_images"]["shape"] == [10, 1, 16, 16]
    own = base64.b64decode(answer["capsule_images"]["data"])[256 * answer["winner"] :][:256]
    assert own == base64.b64decode(answer["reconstruction"]["data"])
    pose, limits = answer["pose"][answer["winner"]], answer["limits"]
    assert all(low < x < high for low, x, high in zip(limits["low"], pose, limits["high"], strict=True))


def test_routing_and_its_histogram_where_there_is_one(address):
    answer = post(address, "/api/runs/0/routing", {"image": IMAGE, "parent": 3, "children": [0, 5]})
    h, w = get(address, "/api/runs/0")["places"]
    assert answer["maps"]["shape"] == [3, h, w] and answer["histogram"] is None
    assert torch.tensor(answer["chosen_coupling"]).shape == (3, 2) and torch.tensor(answer["chosen_votes"]).shape == (
        2,
        2,
    )
    assert len(answer["vote_children"]) == len(answer["votes"]) and answer["vote_children"][0] in range(2 * h * w)
    last = post(address, "/api/runs/0/infer", {"image": IMAGE})["activation"]
    torch.testing.assert_close(torch.tensor(answer["activation"][-1]), torch.tensor(last), rtol=1e-4, atol=1e-5)
    matrix = post(address, "/api/runs/1/routing", {"image": IMAGE, "parent": 3})
    assert len(matrix["histogram"]["edges"]) == 1 + len(matrix["histogram"]["counts"][0])


def test_draw_sweep_sample_and_grid(address):
    drawn = post(address, "/api/runs/0/draw", {"capsule": 2, "pose": POSE})["image"]
    sweep = post(address, "/api/runs/0/sweep", {"capsule": 2, "pose": POSE, "steps": 3})
    assert sweep["images"]["shape"] == [4, 3, 1, 16, 16]
    middle = base64.b64decode(sweep["images"]["data"])[256:512]  # the limits are as far to both sides
    near = zip(middle, base64.b64decode(drawn["data"]), strict=True)
    assert all(abs(a - b) <= 1 for a, b in near)
    won = post(address, "/api/runs/0/sample-grid", {"count": 2, "domain": "empirical", "seed": 5})
    capsule = won["capsules"][0]
    assert won["images"]["shape"] == [2, len(won["capsules"]), 1, 16, 16]
    sample = post(address, "/api/runs/0/sample", {"capsule": capsule, "domain": "empirical", "seed": 5})
    assert sample["pose"] == won["poses"][0][0] and len(sample["low"]) == len(sample["high"]) == 4
    again = post(address, "/api/runs/0/draw", {"capsule": capsule, "pose": sample["pose"]})["image"]
    assert again["shape"] == sample["image"]["shape"] == [1, 16, 16]


def test_what_is_wrong_with_a_question_is_said(address):
    draw = "/api/runs/0/draw"
    assert "unknown key" in refused(address, draw, {"capsule": 0, "pose": POSE, "path": "/etc/passwd"})
    assert "missing key 'pose'" in refused(address, draw, {"capsule": 0})
    assert "[4] is wanted" in refused(address, draw, {"capsule": 0, "pose": [0.0]})
    assert "capsule 10" in refused(address, draw, {"capsule": 10, "pose": POSE})
    assert "from -10000" in refused(address, draw, {"capsule": 0, "pose": [1e5, 0, 0, 0]})
    assert "not a whole number" in refused(address, draw, {"capsule": True, "pose": POSE})
    assert "not JSON" in refused(address, draw, b"{")
    assert "not JSON" in refused(address, draw, b"\xff\xfe")
    assert "NaN" in refused(address, draw, b'{"capsule": 0, "pose": [NaN, 0, 0, 0]}')
    assert "finite" in refused(address, draw, b'{"capsule": 0, "pose": [1e999, 0, 0, 0]}')
    assert "twice" in refused(address, draw, b'{"capsule": 0, "capsule": 1, "pose": [0, 0, 0, 0]}')
    assert "nested" in refused(address, draw, b"[" * 60000)
    assert "cannot be read" in refused(address, draw, b'{"capsule": ' + b"9" * 6000 + b"}")
    refused(address, draw, b"[]")
    refused(address, draw, b"")


def test_pictures_and_bounds_are_checked(address):
    infer, routing = "/api/runs/0/infer", "/api/runs/0/routing"
    assert "[1, 16, 16]" in refused(address, infer, {"image": {"shape": [1, 28, 28], "data": ""}})
    assert "255 bytes" in refused(
        address, infer, {"image": {"shape": [1, 16, 16], "data": base64.b64encode(bytes(255)).decode()}}
    )
    assert "not base64" in refused(address, infer, {"image": {"shape": [1, 16, 16], "data": "é" * 20}})
    assert "64 at most" in refused(address, routing, {"image": IMAGE, "parent": 0, "children": [0] * 65})
    assert "child 9999" in refused(address, routing, {"image": IMAGE, "parent": 0, "children": [9999]})
    assert "from 2 to 15" in refused(address, "/api/runs/0/sweep", {"capsule": 0, "pose": POSE, "steps": 99})
    assert "from 1 to 8" in refused(address, "/api/runs/0/sample-grid", {"count": 9, "domain": "empirical", "seed": 0})
    assert "unknown domain" in refused(address, "/api/runs/0/sample", {"capsule": 0, "domain": "x", "seed": 0})
    assert "seed" in refused(address, "/api/runs/0/sample-grid", {"domain": "empirical", "seed": 1 << 31})


def test_what_draws_nothing_says_so(address):
    facts = get(address, "/api/runs/1")
    answer = post(address, "/api/runs/1/infer", {"image": IMAGE})
    assert (
        not facts["has_decoder"]
        and facts["domains"] == []
        and answer["reconstruction"] is None
        and answer["capsule_images"]["shape"] == [10, 1, 16, 16]  # test images of near poses
    )
    refused(address, "/api/runs/1/draw", {"capsule": 0, "pose": [0.0] * 16})
    refused(address, "/api/runs/1/sample-grid", {"domain": "empirical"})


def test_a_damaged_run_is_a_line_and_the_others_go_on(address):
    status, _, answer = ask(address, "GET", "/api/runs/3")
    assert status == 500 and "no whole safetensors file" in answer["error"], answer
    assert get(address, "/api/runs/0")["id"] == 0


@pytest.mark.parametrize(
    "path",
    ["/api", "/api/runs/", "/api/runs/4", "/api/runs/-1", "/api/runs/x", "/api/runs/" + "1" * 5000, "/x",
     "/api/runs/0/examples/x", "/static/", "/static/none.js", "/static/../server.py", "/static/..%2fserver.py",
     "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/%00"],
)  # fmt: skip
def test_what_is_not_there(address, path):
    status, headers, answer = ask(address, "GET", path)
    assert status == 404 and answer == {"error": "Not Found"} and headers["x-content-type-options"] == "nosniff"


def test_methods(address):
    assert ask(address, "GET", "/api/runs/0/draw")[0] == 405
    assert ask(address, "POST", "/api/runs", {})[0] == 405
    assert ask(address, "DELETE", "/api/runs/0")[0] == 405
    assert refused(address, "/api/runs/0/nothing", {}, 404) == "Not Found"


def test_the_page_s_files_come_from_a_table(address):
    assert all(re.fullmatch(r"[\w-]+\.\w+", name) for name in routes.static_files())
    for name, file in routes.static_files().items():
        status, headers, answer = ask(address, "GET", f"/static/{name}")
        assert status == 200 and headers["content-type"] == file.media_type
        assert file.media_type == "application/json" or answer == file.content
    if "index.html" in routes.static_files():
        assert ask(address, "GET", "/")[2] == routes.static_files()["index.html"].content


def test_an_error_of_ours_is_a_line(address, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr(routes, "describe_run", broken)
    status, headers, answer = ask(address, "GET", "/api/runs/0")
    assert status == 500 and answer == {"error": "unexpected ZeroDivisionError: in the middle"}
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("standardized", [False, True])
@pytest.mark.parametrize("name", EXPLORABLE)
def test_every_model_answers_every_request(name, standardized):
    model, bytes_of = built(SMALL[name]), torch.randint(256, (12, *SPEC[:3]), dtype=torch.uint8)
    data = Dataset(bytes_of, torch.zeros(12, dtype=torch.int64), SPEC.classes)
    examples = Examples(data, "data", ("x", "y", "z"), standardized and name != "poe")
    system = system_of(name)
    view = system.explore(model, examples.names, examples.inputs)
    run = OpenRun(RunEntry(name, system.name, Path()), TrainedRun(model, tiny(), 7, 1.0), view, examples)
    known, image = describe_run(0, run), get_example(3, run)["image"]
    assert known["kind"] == system.name and known["display"] == ("standardized" if examples.standardized else "unit")
    inferred = respond(run, "infer", image=image)
    J, K, domain = len(known["names"]), known["dimension"], {"domain": (known["domains"] or [""])[0], "seed": 1}
    assert torch.tensor(inferred["pose"]).shape == (J, K) and len(inferred["activation"]) == J
    routing = respond(run, "routing", image=image, parent=J - 1, children=[0])
    assert routing["maps"]["shape"] == [known["iterations"], *known["places"]]
    # Any other router can route the same votes, except where routing is part of the energy
    assert bool(known["routers"]) == (system.name != "poe")
    for router in known["routers"]:
        again = respond(run, "routing", image=image, parent=0, router=router)
        assert len(again["activation"][0]) == J and len(again["mean"]) == len(again["activation"])
    assert (inferred["competition"] is None) == (system.name != "sparse")
    assert (known["frame"] is None) == (inferred["frame"] is None)
    if not known["has_decoder"]:
        assert inferred["reconstruction"] is None and name.startswith("matrix")
        assert inferred["nearest"]["shape"] == [J, 4, *SPEC[:3]]
        return
    capsule, pose = inferred["winner"], inferred["pose"][inferred["winner"]]
    assert respond(run, "draw", capsule=capsule, pose=pose)["image"]["shape"] == [*SPEC[:3]]
    assert respond(run, "sweep", capsule=capsule, pose=pose)["images"]["shape"] == [K, 9, *SPEC[:3]]
    assert len(respond(run, "sample", capsule=capsule, **domain)["pose"]) == K
    assert respond(run, "sample-grid", count=2, **domain)["images"]["shape"][0] == 2


def respond(run: OpenRun, name: str, **request):
    """The response, which JSON must be able to hold."""
    action = ACTIONS[name]
    response = action.respond(run, parse_request(action.request, json.dumps(request).encode()))
    json.dumps(response, allow_nan=False)
    return response


def test_what_a_model_drew_gets_the_light_of_its_image_back():
    data = Dataset(torch.randint(256, (5, 2, 6, 6), dtype=torch.uint8), torch.zeros(5, dtype=torch.int64), 2)
    examples, image = Examples(data, "data", ("a", "b"), True), data.images[3].float() / 255
    model_input = examples.to_input(image.unsqueeze(0))[0]
    assert model_input.mean().abs() < 1e-5 and abs(float(model_input.std(correction=0)) - 1) < 1e-4
    torch.testing.assert_close(examples.to_display(model_input, image), image)
    assert examples.to_display(torch.zeros(2, 6, 6)).mean() == pytest.approx(float(data.images.float().mean() / 255))
    assert Examples(None, "none", ()).to_display(model_input) is model_input and len(Examples(None, "none", ())) == 0


def test_examples_of_pairs_and_of_other_things():
    labels = torch.tensor([[3, 7], [1, 0]])
    pairs = Dataset(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), labels, 10)
    several = Examples(pairs, "data", tuple("0123456789"))
    assert (several.label(0), several.name(0)) == (None, "3 and 7")
    drawn = Examples(Dataset(pairs.images, labels[:, 0], 10), "glyphs", ("T-shirt",) * 10)
    assert (drawn.label(0), drawn.name(0)) == (None, "digit 3, drawn by code")
    with pytest.raises(ShapeError, match="example 2"):
        drawn.image(2)


# ---------------------------------------------------------------------------------------------- the registry


def test_every_capsule_model_can_be_explored():
    assert set(EXPLORABLE) == set(MODELS) - {"autoencoder", "cnn", "convnet"}


def test_named_runs_must_be_explorable(folders):
    with pytest.raises(RecipeError, match="model 'cnn', which cannot be explored"):
        find_runs([folders / "e"])
    with pytest.raises(CheckpointError, match="holds no checkpoint and no runs"):
        find_runs([folders / "nowhere"])
    with pytest.raises(DataError, match="is no folder"):
        find_runs([folders / "a"], data_dir=folders / "nowhere")


def test_runs_are_found_and_others_passed_over(folders, tmp_path, monkeypatch):
    names = [entry.name for entry in find_runs([], root=folders).entries if not entry.shipped]
    assert names == ["a", "b", "c", "d"]
    assert shipped_runs()[0].name == FIRST_MODEL
    assert bool(shipped_runs()) == any(entry.shipped for entry in find_runs([], root=folders).entries)
    monkeypatch.setattr("torchcaps.explore.run_registry.shipped_runs", list)
    with pytest.raises(RecipeError, match="torchcaps explore RUN"):
        find_runs([], root=tmp_path)


def test_runs_are_found_one_level_deeper_and_in_a_named_folder(tmp_path):
    """As `torchcaps demo` leaves them: runs/demo/poe-quick."""
    tiny_run(tmp_path / "runs" / "first")
    tiny_run(tmp_path / "runs" / "demo" / "poe-quick")
    tiny_run(tmp_path / "runs" / "a" / "b" / "too-deep")
    registry = find_runs([], root=tmp_path / "runs")
    assert [entry.name for entry in registry.entries if not entry.shipped] == ["demo/poe-quick", "first"]
    shipped = [entry.name for entry in shipped_runs()]
    assert [entry.name for entry in find_runs([tmp_path / "runs"]).entries] == ["demo/poe-quick", "first", *shipped]
    assert [entry.name for entry in find_runs([tmp_path / "runs" / "demo"]).entries] == ["poe-quick", *shipped]


def test_a_run_without_recipe_json_is_known_by_its_checkpoint(tmp_path):
    (tiny_run(tmp_path / "a") / "recipe.json").unlink()
    assert find_runs([tmp_path / "a"]).entries[0].kind == "capsnet"


def test_few_runs_are_kept_in_memory(folders):
    registry = RunRegistry(find_runs([folders / "a"]).entries[:1] * (MAX_OPEN + 1))
    first = registry.open(0)
    assert registry.open(0) is first
    for n in range(1, MAX_OPEN + 1):
        registry.open(n)
    assert not registry.is_open(0) and registry.is_open(MAX_OPEN)


def test_the_shipped_run_knows_its_own_examples():
    registry = find_runs([], root=Path("nowhere"))
    opened = registry.open(0)
    assert registry.entries[0].shipped and opened.examples.source == "own"
    right = [opened.view.infer(opened.examples.image(n).float() / 255).winner == opened.examples.label(n)
             for n in range(20)]  # fmt: skip
    assert sum(right) >= 18


# ---------------------------------------------------------------------------------------------- messages


def test_pictures_come_back_as_they_went():
    image = torch.arange(12, dtype=torch.uint8).view(1, 3, 4)
    sent = encode_images(image)
    assert sent["shape"] == [1, 3, 4]
    back = decode_image(EncodedImage((1, 3, 4), sent["data"]), (1, 3, 4))
    assert torch.equal(back, image.float() / 255)
    assert encode_images(back) == sent
    assert base64.b64decode(encode_images(torch.tensor([[-1.0, 2.0, float("nan"), 0.5]]))["data"]) == bytes(
        [0, 255, 0, 128]
    )


def test_questions_have_defaults_and_numbers_six_digits():
    assert parse_request(RoutingRequest, b'{"image": {"shape": [1, 1, 1], "data": ""}, "parent": 1}').children == ()
    assert parse_request(DrawRequest, b'{"capsule": 1, "pose": [1]}') == DrawRequest(1, (1.0,))
    assert to_json(torch.tensor([[1 / 3], [1e-9]])) == [[0.333333], [1e-9]]


# ---------------------------------------------------------------------------------------------- the command


def refusal(capsys, *words: object) -> str:
    assert main(["explore", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("torchcaps: ") and err.count("\n") == 1
    return err


def test_the_command_s_refusals(capsys, folders, tmp_path):
    assert "holds no checkpoint" in refusal(capsys, tmp_path)
    assert "65535" in refusal(capsys, folders / "a", "--port", 65536)
    assert "choose another --port or --host" in refusal(capsys, folders / "a", "--host", "no such host")
    with server.listen("127.0.0.1", 0) as taken:
        assert "in use" in refusal(capsys, folders / "a", "--port", taken.getsockname()[1])


def test_without_starlette_the_command_says_what_to_install(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "torchcaps.explore.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert 'pip install "torchcaps[explore]"' in refusal(capsys)


def test_another_host_is_warned_of(capsys, folders, monkeypatch):
    monkeypatch.setattr(server, "serve", lambda registry, host, port, ready: ready(f"http://{host}:{port}/"))
    words = ["explore", str(folders / "a"), "--no-browser", "--port", "1234"]
    assert main([*words, "--host", "0.0.0.0"]) == 0
    out, err = capsys.readouterr()
    assert out == "torchcaps explore: http://0.0.0.0:1234/\n" and "every machine" in err
    assert main(words) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT for a child there")
def test_the_command_prints_its_address_answers_and_ends_with_0(folders):
    words = [sys.executable, "-m", "torchcaps", "explore", str(folders / "a"), "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"torchcaps explore: http://127\.0\.0\.1:(\d+)/\n", line)
            assert found, line + (process.stderr.read() if process.poll() is not None else "")
            assert get(Address("127.0.0.1", int(found[1])), "/api/runs")["runs"][0]["name"] == "a"
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
        finally:
            process.kill()


def test_weights_that_were_given_away_bring_their_own_examples(folders, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    assert main(["export", str(folders / "a"), str(path), "--examples", "1"]) == 0
    (entry,) = (entry for entry in find_runs([path]).entries if not entry.shipped)
    assert (entry.name, entry.kind, entry.shipped) == ("model.safetensors", "capsnet", False)
    opened = find_runs([path]).open(0)
    given = opened.trained.extra["examples.images"]
    assert opened.examples.source == "own" and len(opened.examples) == len(given) > 0
    assert opened.examples.data is not None and torch.equal(opened.examples.data.images, given)
    assert find_runs([folders / "a"]).open(0).examples.source == "data"


def test_small_packets_do_not_wait_for_others():
    """An answer is a head and a body; without this, the body waits 40 ms for the head to be acknowledged."""
    with server.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.parametrize(
    ("name", "several"),
    [("7", "sevens"), ("dress", "dresses"), ("ankle boot", "ankle boots"), ("cats", "cats"), ("class_3", "class_3")],
)
def test_a_capsule_is_named_after_several_things_of_a_class(name, several):
    assert handlers._plural(name) == several
