"""Makes the ingredients of the chain from nothing: a small model, what it first learns, and preference pairs.

    python examples/rlhf/make_task.py [SEED]        writes rlhf_run/task

The prompt is three different digits, such as "729=". The pupil first learns to write the same digits in any order
(worksheets.jsonl). The teacher likes them in rising order, and only ever says which of two answers is better
(pairs.jsonl): of two with the prompt's digits, the one with fewer out of order; and any answer over the same one with a
digit that is wrong, doubled, too many or missing. Without pairs of the second kind nothing tells a reward model that
rising digits from elsewhere are worse, and PPO finds that out.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "arithmetic"))
from task import DIGITS, make_model, write_rows

OUT = Path("rlhf_run/task")
DIGITS_SHOWN = 3
HELD_OUT_SETS = 24  # of the 120 sets of digits: all orders of these are kept out of the rest
WORKSHEETS = 16  # to each prompt
PAIRS = 12  # to each prompt; of held-out ones, 2
BLUNDER_FRACTION = 0.5  # pairs in which the worse answer has not the prompt's digits
MISTAKEN_FRACTION = 0.1  # pairs in which the teacher prefers the worse answer


def make(folder: Path, *, seed: int = 0) -> None:
    """Writes `folder`/model (random weights), worksheets.jsonl, prompts.jsonl, pairs.jsonl, and two held-out files.

    heldout.jsonl holds prompts and heldout_pairs.jsonl pairs without the teacher's mistakes.
    """
    make_model(folder / "model", seed)
    chance = random.Random(seed)
    sets = list(itertools.combinations(DIGITS, DIGITS_SHOWN))
    chance.shuffle(sets)
    kept_out = set(sets[:HELD_OUT_SETS])
    shown = list(itertools.permutations(DIGITS, DIGITS_SHOWN))
    chance.shuffle(shown)
    prompts = [p for p in shown if tuple(sorted(p)) not in kept_out]
    held_out = [p for p in shown if tuple(sorted(p)) in kept_out]
    write_rows(
        folder / "worksheets.jsonl", [worksheet(p, chance) for p in prompts for _ in range(WORKSHEETS)]
    )
    write_rows(folder / "prompts.jsonl", [row(p) for p in prompts])
    write_rows(folder / "heldout.jsonl", [row(p) for p in held_out])
    write_rows(
        folder / "pairs.jsonl", [pair(p, MISTAKEN_FRACTION, chance) for p in prompts for _ in range(PAIRS)]
    )
    write_rows(folder / "heldout_pairs.jsonl", [pair(p, 0.0, chance) for p in held_out for _ in range(2)])


def row(digits: tuple[str, ...]) -> dict[str, str]:
    return {"prompt": f"{''.join(digits)}=", "rising": "".join(sorted(digits))}


def worksheet(digits: tuple[str, ...], chance: random.Random) -> dict[str, str]:
    return {"prompt": f"{''.join(digits)}=", "completion": any_order(digits, chance)}


def any_order(digits: tuple[str, ...], chance: random.Random) -> str:
    return "".join(chance.sample(digits, len(digits)))


def pair(digits: tuple[str, ...], mistaken: float, chance: random.Random) -> dict[str, str]:
    """A better and a worse answer; or the other way round, where the teacher is mistaken."""
    if chance.random() < BLUNDER_FRACTION:
        better = any_order(digits, chance)
        answers = [better, blunder(better, chance)]
    else:
        answers = ["", ""]
        while out_of_order(answers[0]) == out_of_order(answers[1]):
            answers = sorted((any_order(digits, chance) for _ in range(2)), key=out_of_order)
    if chance.random() < mistaken:
        answers.reverse()
    return {"prompt": f"{''.join(digits)}=", "chosen": answers[0], "rejected": answers[1]}


def blunder(answer: str, chance: random.Random) -> str:
    """The answer with a digit that is none of the prompt's or there already, or with one too many, or one missing."""
    place = chance.randrange(len(answer))
    right = answer[place]
    wrong = chance.choice([d for d in DIGITS if d != right])
    # the first is the hardest to see, and shown most often: the others have the wrong length
    instead = chance.choices((wrong, right + wrong, ""), weights=(4, 1, 1))[0]
    return answer[:place] + instead + answer[place + 1 :]


def out_of_order(answer: str) -> int:
    """Pairs of digits of which the larger comes first: 0 for a rising answer, 3 for a falling one of three digits."""
    return sum(a > b for a, b in itertools.combinations(answer, 2))


if __name__ == "__main__":
    make(OUT, seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
