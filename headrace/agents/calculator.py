"""A calculator for models: it reads arithmetic itself and never evaluates text as code."""

from __future__ import annotations

from fractions import Fraction

from headrace.agents.tools import ToolError

LONGEST = 200  # characters of an expression
DEEPEST = 50  # parentheses and signs inside each other
MOST_BITS = 512  # of a numerator or denominator: about 150 digits
DIGITS_SHOWN = 12  # of a number whose decimals do not end

DIGITS = "0123456789"
SPACES = " \t\n"


def calculator(expression: str) -> str:
    """The value of an arithmetic expression with numbers, + - * / and parentheses, such as (3 + 4.5) * 2."""
    return shown(calculate(expression))


def calculate(expression: str) -> Fraction:
    """The exact value. Grammar, over ASCII characters, with white space anywhere between the parts:

        sum = product {("+" | "-") product}
        product = factor {("*" | "/") factor}
        factor = ("+" | "-") factor | "(" sum ")" | number
        number = digits ["." [digits]] | "." digits

    Raises ToolError, in words meant for the model, for anything else, for a division by zero, and for an expression,
    nesting or number beyond the limits above.
    """
    if len(expression) > LONGEST:
        raise ToolError(f"the expression is longer than {LONGEST} characters")
    parser = _Parser(expression)
    value = parser.sum(0)
    if parser.peek():
        raise parser.unexpected()
    return value


def shown(value: Fraction) -> str:
    """The number in decimals: exactly where they end within DIGITS_SHOWN places, else rounded to so many digits."""
    scaled = value * 10**DIGITS_SHOWN
    if value.denominator == 1:
        return str(value.numerator)
    if scaled.denominator == 1:
        sign, digits = "-" if scaled < 0 else "", str(abs(scaled.numerator)).rjust(DIGITS_SHOWN + 1, "0")
        return f"{sign}{digits[:-DIGITS_SHOWN]}.{digits[-DIGITS_SHOWN:].rstrip('0')}"
    return f"{float(value):.{DIGITS_SHOWN}g}"


class _Parser:
    """Recursive descent, one method a line of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while self.at < len(self.text) and self.text[self.at] in SPACES:
            self.at += 1
        return self.text[self.at : self.at + 1]

    def unexpected(self) -> ToolError:
        found = self.peek()
        if not found:
            return ToolError("the expression ends too early")
        return ToolError(
            f"{found!r} at character {self.at + 1} is not understood; use numbers, + - * / and parentheses"
        )

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while (sign := self.peek()) and sign in "+-":
            self.at += 1
            other = self.product(depth)
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while (sign := self.peek()) and sign in "*/":
            self.at += 1
            other = self.factor(depth)
            if sign == "/" and other == 0:
                raise ToolError("division by zero")
            value = _bounded(value * other if sign == "*" else value / other)
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > DEEPEST:
            raise ToolError(f"more than {DEEPEST} parentheses or signs stand inside each other")
        sign = self.peek()
        if sign and sign in "+-":
            self.at += 1
            value = self.factor(depth + 1)
            return -value if sign == "-" else value
        if sign == "(":
            self.at += 1
            value = self.sum(depth + 1)
            if self.peek() != ")":
                raise ToolError("a parenthesis is not closed") if not self.peek() else self.unexpected()
            self.at += 1
            return value
        return self.number()

    def number(self) -> Fraction:
        self.peek()
        start = self.at
        whole = self._digits()
        decimals = ""
        if self.text[self.at : self.at + 1] == ".":
            self.at += 1
            decimals = self._digits()
        if not whole and not decimals:
            self.at = start
            raise self.unexpected()
        return _bounded(Fraction(int(whole + decimals), 10 ** len(decimals)))

    def _digits(self) -> str:
        start = self.at
        while self.at < len(self.text) and self.text[self.at] in DIGITS:
            self.at += 1
        return self.text[start : self.at]


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ToolError("the number has too many digits")
    return value
