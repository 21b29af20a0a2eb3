"""Makes the ingredients of the chain from nothing: a small model, what it first learns, and preference pairs.

    python examples/rlhf/make_task.py        writes rlhf_run/task

The prompt is four different digits, such as "7294=". The pupil first learns to write the same digits in any order
(worksheets.jsonl). The teacher likes them in rising order, and only ever says which of two answers is better: the one
with fewer digits out of order, and any order of the right digits over an answer with a digit too many (pairs.jsonl).
A rising answer is shown nowhere as the thing to write.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "arithmetic"))
from task import DIGITS, make_model, write_rows

OUT = Path("rlhf_run/task")
DIGITS_SHOWN = 4
HELD_OUT = 256  # prompts; all orders of their digits are kept out of the rest
BLUNDER_FRACTION = 0.2  # pairs in which the worse answer has a digit too many
MISTAKEN_FRACTION = 0.1  # pairs in which the teacher prefers the worse answer


def make(folder: Path, *, seed: int = 0) -> None:
    """Writes `folder`/model (random weights), worksheets.jsonl, prompts.jsonl, pairs.jsonl, and two held-out files.

    heldout.jsonl holds prompts and heldout_pairs.jsonl pairs without the teacher's mistakes.
    """
    make_model(folder / "model", seed)
    chance = random.Random(seed)
    sets = list(itertools.combinations(DIGITS, DIGITS_SHOWN))
    chance.shuffle(sets)
    kept_out = set(sets[: len(sets) // 10])
    shown = list(itertools.permutations(DIGITS, DIGITS_SHOWN))
    chance.shuffle(shown)
    prompts = [p for p in shown if tuple(sorted(p)) not in kept_out]
    held_out = [p for p in shown if tuple(sorted(p)) in kept_out][:HELD_OUT]
    write_rows(folder / "worksheets.jsonl", [worksheet(p, chance) for p in prompts for _ in range(4)])
    write_rows(folder / "prompts.jsonl", [row(p) for p in prompts])
    write_rows(folder / "heldout.jsonl", [row(p) for p in held_out])
    write_rows(folder / "pairs.jsonl", [pair(p, MISTAKEN_FRACTION, chance) for p in prompts])
    write_rows(folder / "heldout_pairs.jsonl", [pair(p, 0.0, chance) for p in held_out])


def row(digits: tuple[str, ...]) -> dict[str, str]:
    return {"prompt": f"{''.join(digits)}=", "rising": "".join(sorted(digits))}


def worksheet(digits: tuple[str, ...], chance: random.Random) -> dict[str, str]:
    return {"prompt": f"{''.join(digits)}=", "completion": any_order(digits, chance)}


def any_order(digits: tuple[str, ...], chance: random.Random) -> str:
    return "".join(chance.sample(digits, len(digits)))


def pair(digits: tuple[str, ...], mistaken: float, chance: random.Random) -> dict[str, str]:
    """A better and a worse answer; or the other way round, where the teacher is mistaken."""
    if chance.random() < BLUNDER_FRACTION:
        worse = any_order(digits, chance) + chance.choice(DIGITS)
        answers = [any_order(digits, chance), "".join(chance.sample(worse, len(worse)))]
    else:
        answers = ["", ""]
        while out_of_order(answers[0]) == out_of_order(answers[1]):
            answers = sorted((any_order(digits, chance) for _ in range(2)), key=out_of_order)
    if chance.random() < mistaken:
        answers.reverse()
    return {"prompt": f"{''.join(digits)}=", "chosen": answers[0], "rejected": answers[1]}


def out_of_order(answer: str) -> int:
    """Pairs of digits of which the larger comes first: 0 for a rising answer, 6 for a falling one of four digits."""
    return sum(a > b for a, b in itertools.combinations(answer, 2))


if __name__ == "__main__":
    make(OUT)
