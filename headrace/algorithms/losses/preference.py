"""Losses over pairs of a chosen and a rejected response. Shapes: P pairs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected), in nats per pair: scores [P], [P] → [P].

    The probability that the chosen response is preferred, by Bradley and Terry's model, is that sigmoid. Christiano
    et al. 2017, https://arxiv.org/abs/1706.03741, section 2.2.3; Ouyang et al. 2022,
    https://arxiv.org/abs/2203.02155, eq. 1 (with two responses a prompt).
    """
    return -logsigmoid(chosen - rejected)


def dpo_reward(logprob_ratio: Tensor, beta: float) -> Tensor:
    """beta x log(policy / reference) of whole responses: [P] → [P], the reward that DPO's policy is optimal for.

    Up to a constant of the prompt, which a difference does not see. Rafailov et al. 2023,
    https://arxiv.org/abs/2305.18290, eq. 5; `bradley_terry` of two such rewards is its eq. 7.
    """
    return beta * logprob_ratio
