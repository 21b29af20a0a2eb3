"""Measures of the chain; nothing learns from them."""


def score(completion: str, rising: str) -> dict[str, float]:
    """For `headrace eval`: 1 for the prompt's digits in rising order; and whether they are the prompt's at all."""
    return {"reward": float(completion == rising), "same_digits": same_digits(completion, rising)}


def watched(completion: str, rising: str) -> dict[str, float]:
    """For PPO: adds nothing to the reward model's score; draws `reward/part/rising` and `reward/part/same_digits`."""
    return {
        "reward": 0.0,
        "rising": float(completion == rising),
        "same_digits": same_digits(completion, rising),
    }


def same_digits(completion: str, rising: str) -> float:
    return float("".join(sorted(completion)) == rising)
