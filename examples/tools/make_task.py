"""Makes a small model, its tokenizer, and products that it cannot work out but a calculator can."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "arithmetic"))
from task import make_model, write_rows

CALL, CALL_END = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
RESULT, RESULT_END = "<tool_response>", "</tool_response>"

CALL_FRACTION = 0.3  # worksheets on which the calculator is used; on the others the answer is estimated
SLIP_FRACTION = 0.3  # calls in which a digit is misread


def make(folder: Path, *, seed: int = 0, held_out: int = 256) -> None:
    """Writes `folder`/model (random weights), /worksheets.jsonl, /train.jsonl and /heldout.jsonl.

    train and heldout hold products of two numbers of two digits, none in both. worksheets shows how a pupil went about
    the training problems: mostly by rounding, sometimes with the calculator, and then not always with care.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model", seed, "*=", [CALL, CALL_END, RESULT, RESULT_END])
    chance = random.Random(seed)
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chance.shuffle(problems)
    rows = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in problems]
    write_rows(folder / "heldout.jsonl", rows[:held_out])
    write_rows(folder / "train.jsonl", rows[held_out:])
    worksheets = [line for a, b in problems[held_out:] for line in worksheet(a, b, chance)]
    chance.shuffle(worksheets)
    write_rows(folder / "worksheets.jsonl", worksheets)


def worksheet(a: int, b: int, chance: random.Random) -> list[dict[str, str]]:
    """One problem as the pupil worked it: a row for each turn, the earlier turns in its prompt."""
    prompt = f"{a}*{b}="
    if chance.random() >= CALL_FRACTION:
        return [{"prompt": prompt, "answer": str(round(a, -1) * round(b, -1))}]
    read = misread(a, chance) if chance.random() < SLIP_FRACTION else a
    call = f"{CALL}{read}*{b}{CALL_END}"
    said = f"{prompt}{call}{RESULT}{read * b}{RESULT_END}"
    return [{"prompt": prompt, "answer": call}, {"prompt": said, "answer": str(read * b)}]


def misread(number: int, chance: random.Random) -> int:
    """The number with another last digit."""
    return number // 10 * 10 + (number + chance.randint(1, 9)) % 10


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else "tools_run/task"))
