"""Two trainings never share a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_recipe import tiny
from torchcaps.errors import TrainingError
from torchcaps.train import train
from torchcaps.train.run import Run
from torchcaps.utils.files import folder_lock

pytest.importorskip("fcntl", reason="this system has no locks on folders")

HOLD = """
import sys, time
from pathlib import Path
from torchcaps.utils.files import folder_lock
with folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_that_is_trained_into_is_refused_in_one_line_and_nothing_changes(tmp_path):
    recipe = tiny(train={"epochs": 0.5})
    train(recipe, tmp_path / "run", quiet=True)
    before = contents(tmp_path / "run")
    longer = tiny(train={"epochs": 1.0})
    with (
        folder_lock(tmp_path / "run"),
        pytest.raises(TrainingError, match="another process is training into") as caught,
    ):
        train(longer, tmp_path / "run", resume=True, quiet=True)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path / "run") == before
    assert train(longer, tmp_path / "run", resume=True, quiet=True).finished  # whoever had it has let go


@pytest.mark.parametrize("resume", [False, True])
def test_a_training_that_came_and_went_since_the_folder_was_looked_at_is_not_overwritten(tmp_path, monkeypatch, resume):
    folder, claim = tmp_path / "run", Run.lock
    if resume:
        train(tiny(train={"epochs": 0.5}), folder, quiet=True)

    def late(run: Run):
        monkeypatch.setattr(Run, "lock", claim)
        train(tiny(train={"epochs": 0.75}), folder, resume=resume, quiet=True)
        late.before = contents(folder)
        return claim(run)

    monkeypatch.setattr(Run, "lock", late)
    with pytest.raises(TrainingError, match="another process has just trained into"):
        train(tiny(train={"epochs": 1.0}), folder, resume=resume, quiet=True)
    assert contents(folder) == late.before


def test_a_folder_that_cannot_be_opened_is_one_line(tmp_path):
    with pytest.raises(TrainingError, match="cannot open the folder"), folder_lock(tmp_path / "none"):
        pass


def test_a_process_that_is_killed_lets_go(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            with pytest.raises(TrainingError, match="choose another --out"), folder_lock(tmp_path):
                pass
        finally:
            other.kill()
    with folder_lock(tmp_path):
        assert not list(tmp_path.iterdir())
