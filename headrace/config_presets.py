"""What `algorithm.name` stands for: the advantage, the loss and the other keys that a paper's algorithm sets.

A key that is not listed keeps its own default, and one that the user sets wins over the preset. The KL keys say
where a KL goes and how it is estimated; there is one only where `algorithm.kl_coefficient` is above 0.
"""

from __future__ import annotations

from typing import Any

_KL_IN_REWARD = {"kl_placement": "reward", "kl_estimator": "k1"}

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, arXiv 2402.03300
    "grpo": {},
    # Schulman et al. 2017, arXiv 1707.06347; KL as in Ouyang et al. 2022, arXiv 2203.02155
    "ppo": {"advantage": "gae", **_KL_IN_REWARD},
    # Liu et al. 2025, arXiv 2503.20783
    "dr_grpo": {"normalize_std": False, "reduction": "constant"},
    # Yu et al. 2025, arXiv 2503.14476: cap and cache of the length penalty as in its section 4.1 (4096 of 20480)
    "dapo": {"clip_high": 0.28, "filter_groups": True, "overlong_fraction": 0.2},
    # Ahmadian et al. 2024, arXiv 2402.14740
    "rloo": {"advantage": "rloo", "reduction": "sequence_mean_token_sum", **_KL_IN_REWARD},
    # Li et al. 2023, arXiv 2310.10505
    "remax": {"advantage": "remax", "reduction": "sequence_mean_token_sum", **_KL_IN_REWARD},
    # Hu 2025, arXiv 2501.03262, and its variant with the group's mean as baseline
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus", **_KL_IN_REWARD},
    "reinforce_plus_plus_baseline": {"advantage": "reinforce_plus_plus_baseline", "kl_estimator": "k2"},
    # Zheng et al. 2025, arXiv 2507.18071: the clip range of its section 5.1
    "gspo": {"loss": "gspo", "reduction": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax 2025, arXiv 2506.13585: no lower bound; the upper one is tuned there and not stated. 1 + 4 is this
    # project's choice: little depends on it (Khatri et al. 2025, arXiv 2510.13786, appendix A.17.2)
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    # Williams 1992, with the mean reward of the step as baseline
    "policy_gradient": {
        "advantage": "batch_mean",
        "loss": "policy_gradient",
        "reduction": "sequence_mean_token_sum",
        **_KL_IN_REWARD,
    },
}

# Built-in advantages that compare the samples of a prompt: also declared where they are defined, but a
# configuration is checked without importing torch (a test holds the two against each other).
GROUPED_ADVANTAGES = frozenset({"grpo", "rloo", "reinforce_plus_plus_baseline"})
