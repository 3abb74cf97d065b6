"""What training says into a log file: loss, speed and time left, once a minute and at the end."""

from __future__ import annotations

import re

from torchcaps.utils import progress
from torchcaps.utils.progress import TrainingProgress


def test_a_log_file_gets_one_line_a_minute_and_one_at_the_end(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with TrainingProgress("run", total=40, done=0, batch=10) as shown:
        for step in range(1, 41):
            now[0] += 5.0
            shown.update(step, {"loss": 1 / step}, is_last=step == 40)
    lines = capsys.readouterr().err.splitlines()
    assert [re.search(r"step (\d+)/40", line)[1] for line in lines] == ["13", "26", "39", "40"]
    assert lines[0] == "run: step 13/40, loss 0.0769, 2 images/s, 135 s left"


def test_the_line_tells_how_often_classes_are_right(capsys):
    with TrainingProgress("run", total=2, done=0, batch=10) as shown:
        shown.update(1, {"loss": 1.0, "accuracy": 0.5, "validation_accuracy": 0.25}, is_last=False)
        shown.update(2, {"loss": 1.0, "accuracy": 1.0}, is_last=True)
    # That of the steps is smoothed, that of the validation is the last one
    assert "loss 1.0000, accuracy 55%, validation 25.00%, " in capsys.readouterr().err


def test_quiet_training_says_nothing(capsys):
    with TrainingProgress("run", total=1, done=0, batch=10, quiet=True) as shown:
        shown.update(1, {"loss": 1.0}, is_last=True)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_with_loss_rate_and_time_left(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with TrainingProgress("run", total=40, done=0, batch=10) as shown:
        shown.update(13, {"loss": 0.0769, "accuracy": 0.5}, is_last=False)
    bar = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert re.search(r"run .*13/40 loss 0\.0769, accuracy 50% \d+ images/s .* left", bar)
    assert "step 13/40" not in bar  # lines are for log files


def test_a_log_file_says_once_that_loops_are_compiled(capsys):
    with TrainingProgress("run", total=1, done=0, batch=10) as shown:
        shown.compiling()
        shown.compiling()
        shown.update(1, {"loss": 1.0}, is_last=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "run: compiling loops, once on this machine"
    assert len(lines) == 2 and "loss" in lines[1]
