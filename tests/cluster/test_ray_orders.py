"""What is said of a rank's death."""

from __future__ import annotations

import pytest

from headrace.cluster.ray_orders import one_sentence

RAISED = """\x1b[36mray::RankProcess.run()\x1b[39m (pid=7, ip=127.0.0.1)
           ^^^^^^^^^^^^^^^^^
  File "ray_rank.py", line 9, in run
KeyboardInterrupt: stopped"""


@pytest.mark.parametrize(
    "text, sentence",
    [
        (RAISED, "KeyboardInterrupt: stopped"),
        ("The actor died.\nWorker exit type: SYSTEM_ERROR. Some common causes: many", "Worker exit type: SYSTEM_ERROR."),
        ("no\n  answer", "no answer"),
        ("", ""),
    ],
)  # fmt: skip
def test_one_sentence_without_frames_and_colours(text: str, sentence: str) -> None:
    assert one_sentence(RuntimeError(text)) == sentence
