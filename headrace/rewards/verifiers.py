"""Rewards that check a completion against the right answer, without running or evaluating anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

# a longer mantissa or exponent is an attack on memory, not an answer
_MAX_DIGITS = 400
_MAX_EXPONENT = 400

_NUMBER = re.compile(
    r"(?:(?<![A-Za-z_\d])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
    r"(?P<exponent>[eE][-+]?\d+)?"
)
_SIGN_BEFORE = re.compile(r"(?:^|[^\w)\]}])([-+−])(?:\\?[$€£]\s?)?$")
_SIGN_REACH = 6  # characters before a number that can matter to its sign
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")
_MARK = "####"
_BETWEEN_MARK_AND_NUMBER = " \t-+−$€£\\*:"


def exact_match(completion: str, answer: str | float) -> float:
    """1.0 when the whole completion equals the answer, apart from white space around them; else 0.0."""
    return float(completion.strip() == str(answer).strip())


def numeric_match(completion: str, answer: str | float) -> float:
    """1.0 when completion and answer give the same number, compared exactly; else 0.0.

    The number of a text is the one right after its last `####` (as GSM8K writes its answers), or, without one,
    its last number. See `extract_last_number` for what is a number.
    Raises ValueError when the answer holds none: such a row could never be solved.
    """
    expected = _answer_number(str(answer))
    if expected is None:
        raise ValueError(f"the answer {str(answer)[:80]!r} holds no number")
    return float(_answer_number(completion) == expected)


def extract_last_number(text: str) -> Fraction | None:
    """The last number of the text, exactly; None where there is none.

    Read: 1,234.50  $5  -$5  -3  +7  .5  5. (the dot ends a sentence)  50% (as 50)  3/4  \\frac{3}{4}  1.5e-3.
    A minus counts as a sign only right before the number and not after a word, digit or bracket, so that 10-5
    and a list's "- 5" end in 5. Digits inside a word (x2) are no number; a date 12/05/2023 is three numbers;
    mixed numbers (1 1/2) are read as their last part. A division by zero, or a number of more than 400 digits
    or an exponent beyond ±400, gives None.
    """
    value = None
    for _, value in _numbers(text):  # noqa: B007
        pass
    return value


def _answer_number(text: str) -> Fraction | None:
    _, mark, tail = text.rpartition(_MARK)
    if mark:
        start, value = next(_numbers(tail), (None, None))
        # a heading such as "#### Step 3" marks no answer
        if start is not None and not tail[:start].strip(_BETWEEN_MARK_AND_NUMBER):
            return value
    return extract_last_number(text)


def _numbers(text: str) -> Iterator[tuple[int, Fraction | None]]:
    """(where it starts, value) of each number, in order."""
    text = _LATEX_FRACTION.sub(_plain_fraction, text)
    chain: list[re.Match[str]] = []  # numbers joined by slashes: two are a fraction, more are a date or path
    for match in _NUMBER.finditer(text):
        if chain and text[chain[-1].end() : match.start()] != "/":
            yield from _chain_values(text, chain)
            chain = []
        chain.append(match)
    yield from _chain_values(text, chain)


def _chain_values(text: str, chain: list[re.Match[str]]) -> Iterator[tuple[int, Fraction | None]]:
    if len(chain) != 2:
        for match in chain:
            yield match.start(), _signed_value(text, match)
        return
    numerator, denominator = _signed_value(text, chain[0]), _signed_value(text, chain[1])
    yield chain[0].start(), numerator / denominator if numerator is not None and denominator else None


def _signed_value(text: str, match: re.Match[str]) -> Fraction | None:
    exponent = match["exponent"] or ""
    if len(match[0]) > _MAX_DIGITS or (exponent and abs(int(exponent[1:])) > _MAX_EXPONENT):
        return None
    value = Fraction(match[0].replace(",", ""))
    sign = _SIGN_BEFORE.search(text[max(0, match.start() - _SIGN_REACH) : match.start()])
    return -value if sign and sign[1] in "-−" else value


def _plain_fraction(match: re.Match[str]) -> str:
    # a space keeps 2\frac{1}{2} from becoming 21/2
    apart = " " if match.string[: match.start()][-1:].isdigit() else ""
    return f"{apart}{match[1]}/{match[2]}"


VERIFIERS: dict[str, Callable[..., float]] = {"exact_match": exact_match, "numeric_match": numeric_match}
"""Reward functions that have a short name in `reward.function`."""
