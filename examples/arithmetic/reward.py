"""The reward of the demo: 1 for the right sum, 0 otherwise."""


def score(completion: str, answer: str) -> float:
    return float(completion == answer)
