"""What every table of a config is made of: strict, frozen, and numbers that say their bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Part of a key in the store: letters, digits, `.`, `_` and `-`."""
Reference = Annotated[str, Field(pattern=r"^.+:\w+$")]
"""Code by name: `file.py:name` or `module:name`."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
CountOrZero = Annotated[int, Field(ge=0)]


class Config(BaseModel):
    # Strict: "3" is no number and true is no 1. A typo in a long run costs more than a quotation mark.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
