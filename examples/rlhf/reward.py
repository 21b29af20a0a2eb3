"""Measures of the chain; nothing learns from them."""


def score(completion: str, rising: str) -> float:
    """For `headrace eval`: 1 for the prompt's digits in rising order."""
    return float(completion == rising)


def watched(completion: str, rising: str) -> dict[str, float]:
    """For PPO: adds nothing to the reward model's score, and draws the curve `reward/part/rising`."""
    return {"reward": 0.0, "rising": score(completion, rising)}
