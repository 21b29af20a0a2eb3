"""Per-token estimators of KL(policy || reference) from tokens sampled by the policy.

After J. Schulman, "Approximating KL Divergence", 2020 (joschu.net/blog/kl-approx.html). Write p for the
policy, q for the reference, x ~ p for a sampled token and d = log p(x) - log q(x).

| estimator | value             | mean of the value, x ~ p | mean gradient when used as a loss          |
|-----------|-------------------|--------------------------|--------------------------------------------|
| k1        | d                 | KL(p||q), may be < 0     | 0: it pulls nowhere, it is only noise      |
| k2        | d^2 / 2           | biased, never < 0        | that of KL(p||q)                           |
| k3        | exp(-d) - 1 + d   | KL(p||q), never < 0      | that of KL(q||p), the other direction      |

"As a loss" means differentiating the estimator itself at tokens held fixed, which is what a KL term in the
loss does. With the score s = grad log p(x), for which E_p[s] = 0:
- k1: E_p[s] = 0.
- k2: E_p[d s] = grad KL(p||q).
- k3: E_p[(1 - q/p) s] = -sum_x q(x) grad log p(x) = grad KL(q||p). It vanishes at p = q like the true one
  and agrees with it to first order around p = q.
So k1 belongs in the reward (where the policy gradient supplies the score), k2 in the loss, and k3 is GRPO's
choice in the loss (Shao et al. 2024, arXiv 2402.03300, eq. 4).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0


def kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate [N] in nats at each sampled token; value and gradient as in the table above.

    logprobs, reference_logprobs [N] float, natural logs; the gradient flows into logprobs alone. In k3, d is
    clamped to ±20 inside `exp` (value up to 5e8, no gradient through `exp` beyond). Raises ValueError for
    another estimator.
    """
    d = logprobs - reference_logprobs.detach()
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        # expm1 keeps the digits that exp(-d) - 1 loses where p and q are close
        return (-d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() + d
    raise ValueError(f"unknown KL estimator '{estimator}'; there are k1, k2 and k3")
