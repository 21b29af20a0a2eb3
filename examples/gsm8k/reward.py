"""The reward of GSM8K: 1 when the number after '####' (or, without it, the last number) is the right one."""

from headrace.rewards.verifiers import numeric_match


def score(completion: str, answer: str) -> dict[str, float]:
    """`answer` is the data set's worked solution, which ends in '#### <number>'."""
    right = numeric_match(completion, answer)
    return {"reward": right, "marked_answer": float("####" in completion)}
