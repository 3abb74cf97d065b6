"""A loss that is far above that of the start is spoken of once; usual losses are not."""

from __future__ import annotations

import logging

import pytest

from support.tiny_recipe import tiny
from torchcaps.models import CapsNet
from torchcaps.train import train
from torchcaps.train.loss_watch import LossWatch


def notices(caplog: pytest.LogCaptureFixture, losses: list[float], label: str | None = None) -> list[str]:
    watch = LossWatch(label)
    with caplog.at_level(logging.WARNING, "torchcaps"):
        for step, loss in enumerate(losses, 1):
            watch.see(step, loss)
    return caplog.messages


def test_a_jump_is_spoken_of_once_with_its_step_and_a_remedy(caplog):
    (said,) = notices(caplog, [0.7, 0.6, 0.65, 0.5, 0.5, 0.4, 40.0, 90.0, 0.6], "autoencoder")
    assert "step 7 of stage 'autoencoder'" in said and "57 times" in said and "train.clip" in said


@pytest.mark.parametrize(
    "losses",
    [
        [0.7, 0.5, 0.3, 0.1, 0.01, 0.2, 0.001, 0.3],  # noise of a small loss
        [-0.1, -0.4, -0.5, -0.7, -0.8, -9.0, -90.0],  # a difference of energies that grows
        [0.0] * 8,
        [900.0, 0.4, 0.3, 0.2, 0.2, 0.2, 0.6],  # a bad start is no jump
        [0.5, 50.0, 0.4, 0.3],  # too early to know what is usual
    ],
)
def test_usual_losses_are_not(caplog, losses):
    assert notices(caplog, losses) == []


def test_a_training_that_goes_astray_says_so_and_ends(tmp_path, caplog, monkeypatch):
    real = CapsNet.objective

    def astray(self, batch, step):
        terms = real(self, batch, step)
        return {**terms, "loss": terms["loss"] * (100 if step >= 15 else 1)}

    monkeypatch.setattr(CapsNet, "objective", astray)
    with caplog.at_level(logging.WARNING, "torchcaps"):
        assert train(tiny(train={"log_every": 2}), tmp_path, quiet=True).step == 20
    assert [m for m in caplog.messages if m.startswith("at step 16 the loss is")] == caplog.messages


def test_a_usual_training_says_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "torchcaps"):
        train(tiny(), tmp_path, quiet=True)
    assert caplog.messages == []
