"""Say something that a person should know and that is no error, in one line on standard error."""

from __future__ import annotations

import logging
import os

__all__ = ["LOGGER", "notice"]

LOGGER = logging.getLogger("torchcaps")
"""Where notices go: Python prints its warnings to standard error unless a program decides otherwise."""


def notice(text: str) -> None:
    """Log one line as a warning; of several processes, only the first one speaks.

    Args:
        text: What to say; line breaks become spaces.
    """
    if os.environ.get("RANK", "0") == "0":
        LOGGER.warning(" ".join(text.split()))
