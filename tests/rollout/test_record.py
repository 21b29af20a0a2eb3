import numpy as np

from headrace.rollout.native.record import Record
from headrace.rollout.native.sampler import Draws


def test_what_was_drawn_step_by_step_comes_back_sample_by_sample() -> None:
    """Three samples, of which the second starts late and the third, alone, draws in between."""
    record, counts = Record(3, 4), np.zeros(3, dtype=np.int64)

    def draw(who: list[int], tokens: list[int], version: int) -> None:
        token = np.array(tokens)
        record.add(np.array(who), counts[who], Draws(token, token / -8, token / -4), version)
        counts[who] += 1

    draw([0, 2], [5, 6], 1)
    draw([2], [7], 1)
    draw([2, 1, 0], [1, 2, 3], 2)
    record.stopped[[1, 2]] = True
    assert record.tokens[2, :3].tolist() == [6, 7, 1]
    got = record.completions(counts)
    assert [c.token_ids for c in got] == [[5, 3], [2], [6, 7, 1]]
    assert [c.logprobs for c in got] == [[-0.625, -0.375], [-0.25], [-0.75, -0.875, -0.125]]
    assert [c.untruncated_logprobs for c in got] == [[-1.25, -0.75], [-0.5], [-1.5, -1.75, -0.25]]
    assert [c.weight_versions for c in got] == [[1, 2], [2], [1, 1, 2]]
    assert [c.finish_reason for c in got] == ["length", "stop", "stop"]


def test_nothing_drawn() -> None:
    assert Record(0, 0).completions(np.zeros(0, dtype=np.int64)) == []
