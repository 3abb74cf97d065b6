"""What a run wrote down about itself: one JSON object a line, and TensorBoard events for who wants them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torchcaps.config import Table
from torchcaps.errors import RecipeError, TrainingError
from torchcaps.utils.files import parse_json, read_regular, write_atomically

__all__ = ["Journal", "read_journal"]

_MAX_BYTES = 1 << 30
"""Of a journal; a line has about 200 bytes."""


def read_journal(path: Path) -> list[Table]:
    """The lines of a journal; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise TrainingError(f"cannot read the journal '{path}': {error.strerror}; move it away") from None
    lines = []
    for line in text.splitlines():
        # Nothing after a broken line can be trusted.
        try:
            entry = parse_json(line)
        except ValueError:
            break
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            lines.append(entry)
    return lines


class Journal:
    """Appends to `journal.jsonl` in a run's folder; opened at `step`, it first forgets whatever came after it."""

    def __init__(self, folder: Path, step: int, *, tensorboard: bool = False) -> None:
        self.path = folder / "journal.jsonl"
        # Steps after the last checkpoint will be taken again: their old lines would stand twice.
        kept = [entry for entry in read_journal(self.path) if entry["step"] <= step]
        write_atomically(self.path, [(json.dumps(entry) + "\n").encode() for entry in kept])
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _summary_writer(folder, step) if tensorboard else None

    def write(self, step: int, values: Mapping[str, float], stage: str | None = None) -> None:
        """One line, at once on its way to the disk; with the stage it belongs to, where there is more than one."""
        try:
            self._file.write(json.dumps({"step": step, **({"stage": stage} if stage else {}), **values}) + "\n")
            # Flushed line by line, so that a killed run loses none and `tail -f` shows the last.
            self._file.flush()
        except OSError as error:
            raise TrainingError(f"cannot write {self.path}: {error.strerror}; the last checkpoint is safe") from None
        if self._board:
            for name, value in values.items():
                self._board.add_scalar(f"{stage}/{name}" if stage else name, value, step)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what could not be written has been said
            self._file.close()
        if self._board:
            self._board.close()


def _summary_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RecipeError("TensorBoard is not installed: pip install 'torchcaps[track]'") from None
    # `purge_step` makes TensorBoard drop the events of steps that are taken again.
    return SummaryWriter(str(folder), purge_step=step)
