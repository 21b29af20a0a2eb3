"""What every section of the configuration is made of: documented keys, nothing unknown, checked on assignment."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def key(default: Any, meaning: str, unit: str = "", **limits: Any) -> Any:
    """A documented setting. `unit` is shown by `headrace config --explain`."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        validate_assignment=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
