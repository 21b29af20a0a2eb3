"""headrace's log on the terminal: of commands, and of scripts that set up no logging of their own."""

from __future__ import annotations

import logging
import os
import sys


class _StderrHandler(logging.Handler):
    """Writes to what sys.stderr is at that moment, so that a replaced or captured stderr gets the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")


def set_up_logging() -> None:
    """headrace's log goes to stderr from INFO on; transformers shows warnings only and no progress bars."""
    root = logging.getLogger("headrace")
    if not root.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_warning()
    transformers_logging.disable_progress_bar()
