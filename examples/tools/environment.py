"""A calculator as the environment: it runs the model's tool calls and scores the answer that follows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.agents import Step, ToolEnvironment, Tools
from headrace.agents.calculator import calculator


class Calculator(ToolEnvironment):
    tools = Tools(calculator)

    def reset(self, row: Mapping[str, Any]) -> None:
        self.answer = row["answer"]

    def show(self, result: str) -> str:
        return f"<tool_response>{result}</tool_response>"

    def finish(self, response: str) -> Step:
        return Step(done=True, reward=float(response == self.answer))
