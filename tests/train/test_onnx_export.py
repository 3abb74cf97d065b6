"""Every model as an ONNX file: the names and shapes of what it gives, and that nothing wrong is left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.small_models import DISTINCT, ROUTED, SMALL, SPEC, built, images
from torchcaps.errors import RecipeError, TrainingError
from torchcaps.kernels.threads import SWITCH, kernels_enabled
from torchcaps.models import MODELS
from torchcaps.routing import EM
from torchcaps.train import export
from torchcaps.train.export import export_onnx

onnxruntime = pytest.importorskip("onnxruntime")

SHAPES = {
    "autoencoder": {"features": [4, 4, 4], "reconstruction": [1, 12, 12]},
    "capsnet": {"scores": [3], "pose": [3, 4], "activation": [3]},
    "capsnet-small": {"scores": [3], "pose": [3, 4], "activation": [3]},
    "cnn": {"scores": [3]},
    "convnet": {"scores": [3]},
    "efficient-capsnet": {"scores": [3], "pose": [3, 4], "activation": [3]},
    "matrix": {"scores": [3], "pose": [3, 16], "activation": [3]},
    "matrix-small": {"scores": [3], "pose": [3, 16], "activation": [3]},
    "matrix-tiny": {"scores": [3], "pose": [3, 16], "activation": [3]},
    "poe": {"pose": [4, 4], "activation": [4]},
    "sparse": {"pose": [4, 4], "activation": [4]},
    "sparse-matrix": {"pose": [4, 16], "activation": [4]},
    "sparse-small": {"pose": [4, 4], "activation": [4]},
}
EXPORTED = {**SMALL, "poe, routed": ROUTED, "sparse-matrix": replace(SMALL["sparse-matrix"], routing=EM(iterations=1))}
"""The exporter takes seconds for every iteration of EM; "matrix-small" has two, with the same operators."""
REPEATED = ("matrix", "capsnet-small", "sparse")
"""Models whose layers are all exported by others: EM by "matrix-small" and "sparse-matrix", a shared W and the mask of
"capsnet-small" and "sparse" by "sparse-small", a W for each place by "capsnet"."""
NAMES = [
    pytest.param(name, marks=pytest.mark.long) if name in REPEATED else name for name in (*DISTINCT, "poe, routed")
]


def test_every_registered_model_is_exported_here():
    assert set(SMALL) == set(SHAPES) == set(MODELS)


def run_file(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = [(i.name, i.shape) for i in session.get_inputs()]
    assert given == [("images", ["batch", *SPEC[:3]])]
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, session.run(None, {"images": x.numpy()})), strict=True))


def expected(model, x):
    """What the file must give, by the model's public methods."""
    found = {}
    if type(model).__name__ in ("CNN", "CapsNet", "EfficientCapsNet", "MatrixCaps"):
        found["scores"] = model.scores(x)
    if hasattr(model, "encode"):
        code = model.encode(x)
        found |= code._asdict() if hasattr(code, "_asdict") else {"features": code, "reconstruction": model(x)}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_onnxruntime_gives_what_torch_gives_for_any_number_of_images(tmp_path, name):
    model = built(EXPORTED[name])
    worst = export_onnx(model, tmp_path / "model.onnx")
    assert 0 <= worst <= 1e-4
    shapes = SHAPES[name.split(",")[0]]
    for n in (1, 2, 7):
        x = images(n)
        found = run_file(tmp_path / "model.onnx", x)
        assert {key: list(value.shape) for key, value in found.items()} == {k: [n, *v] for k, v in shapes.items()}
        with torch.no_grad():
            for key, value in expected(model, x).items():
                torch.testing.assert_close(found[key], value, rtol=0, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_the_mode_of_the_model_and_the_switch_come_back(tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, "fast")
    seen = []
    monkeypatch.setattr(export, "_traced", lambda *_: seen.append(kernels_enabled()) or b"file")
    monkeypatch.setattr(export, "_difference", lambda *_: 0.0)
    model = built(SMALL["cnn"]).train()
    assert export_onnx(model, tmp_path / "model.onnx") == 0.0
    assert seen == [False] and kernels_enabled() and model.training
    assert (tmp_path / "model.onnx").read_bytes() == b"file"


@pytest.mark.parametrize("worst", [2e-4, float("nan"), float("inf")])
def test_a_file_that_differs_is_not_written(tmp_path, monkeypatch, worst):
    monkeypatch.setattr(export, "_traced", lambda *_: b"file")
    monkeypatch.setattr(export, "_difference", lambda *_: worst)
    with pytest.raises(TrainingError, match="differs from torch"):
        export_onnx(built(SMALL["cnn"]), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_comparison_sees_a_single_wrong_number(tmp_path):
    model = built(SMALL["cnn"])
    with torch.no_grad():
        data = export._traced(model, images(2), ["scores"])
        right = {"scores": model.scores(images(5))}
        assert export._difference(data, images(5), right) < 1e-5
        right["scores"][4, 2] += 0.25
        assert export._difference(data, images(5), right) == pytest.approx(0.25, abs=1e-5)
        right["scores"][4, 2] = torch.nan
        assert not export._difference(data, images(5), right) <= 1e9


def test_what_cannot_be_traced_is_one_line(tmp_path):
    model = built(SMALL["cnn"])
    model.head.register_forward_hook(lambda m, a, out: out if float(out.sum()) > 0 else -out)
    with pytest.raises(TrainingError, match="CNN cannot be traced") as info:
        export_onnx(model, tmp_path / "model.onnx")
    assert "\n" not in str(info.value)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_converted", lambda *_: pytest.fail("work was done"))
    model, there = built(SMALL["cnn"]), tmp_path / "there.onnx"
    there.write_bytes(b"mine")
    with pytest.raises(RecipeError, match="--force"):
        export_onnx(model, there)
    folder = tmp_path / "folder.onnx"
    folder.mkdir()
    with pytest.raises(RecipeError, match="folder that exists"):
        export_onnx(model, folder)
    with pytest.raises(RecipeError, match="folder that exists"):
        export_onnx(model, tmp_path / "nowhere" / "model.onnx")
    assert there.read_bytes() == b"mine"


def test_without_the_extra_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(RecipeError, match=r"needs onnxscript: pip install 'torchcaps\[onnx\]'"):
        export_onnx(built(SMALL["cnn"]), tmp_path / "model.onnx")
