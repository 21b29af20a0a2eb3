"""Rollouts of several turns: what a user writes (`Environment`, `Tools`) and what plays it."""

from headrace.agents.environment import Environment, Step
from headrace.agents.tools import ToolEnvironment, ToolError, Tools

__all__ = ["Environment", "Step", "ToolEnvironment", "ToolError", "Tools"]
