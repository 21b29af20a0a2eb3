"""What the samples of one rollout have generated, from the first token to their `Completion`s.

Shapes: N samples, M the most tokens one may have, B samples that draw in a step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.rollout.engine import Completion
from headrace.rollout.native.sampler import Draws


class Record:
    """Tokens are at hand while the rollout runs; what comes with them is only put in order when it is over."""

    def __init__(self, samples: int, longest: int) -> None:
        # np.empty touches no memory: a row costs what the sample really generates
        self.tokens = np.empty((samples, longest), dtype=np.int64)  # [N, M]
        self.stopped = np.zeros(samples, dtype=bool)
        self._places: list[NDArray[np.int64]] = []
        self._logprobs: list[NDArray[np.float64]] = []
        self._untruncated: list[NDArray[np.float64]] = []
        self._versions: list[int] = []

    def add(
        self, who: NDArray[np.int64], count: NDArray[np.int64], draws: Draws, weight_version: int
    ) -> None:
        """One token for each of the samples `who` [B], which had `count` [B] before."""
        place = who * self.tokens.shape[1] + count
        self.tokens.reshape(-1)[place] = draws.token_ids
        self._places.append(place)
        self._logprobs.append(draws.logprobs)
        self._untruncated.append(draws.untruncated_logprobs)
        self._versions.append(weight_version)

    def completions(self, counts: NDArray[np.int64]) -> list[Completion]:
        """Of all samples, `counts` [N] tokens each."""
        if not self._places:
            return []
        place = np.concatenate(self._places)
        logprobs, untruncated = np.empty((2, *self.tokens.shape), dtype=np.float64)
        versions = np.empty(self.tokens.shape, dtype=np.int64)
        logprobs.reshape(-1)[place] = np.concatenate(self._logprobs)
        untruncated.reshape(-1)[place] = np.concatenate(self._untruncated)
        versions.reshape(-1)[place] = np.repeat(self._versions, [len(p) for p in self._places])
        return [
            Completion(
                token_ids=self.tokens[i, :n].tolist(),
                logprobs=logprobs[i, :n].tolist(),
                untruncated_logprobs=untruncated[i, :n].tolist(),
                finish_reason="stop" if self.stopped[i] else "length",
                weight_versions=versions[i, :n].tolist(),
            )
            for i, n in enumerate(counts.tolist())
        ]
