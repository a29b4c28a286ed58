"""Building blocks of config tables: strict, frozen, and with bounds on numbers in their types."""

from __future__ import annotations

import os
import re
from enum import Enum, auto
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Place(Enum):
    """Marks for strings that may name something in the folder of the run's file."""

    PATH = auto()
    """A file or a directory."""
    CODE = auto()
    """`file.py:name`, or a name that is looked up elsewhere."""


def of_form(pattern: str, form: str) -> AfterValidator:
    """A check of a whole text. `form`: the pattern in words, for whoever has written another."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"{text!r} must be {form}")
        return text

    return AfterValidator(check)


Count = Annotated[int, Field(ge=1)]
Name = Annotated[
    str,
    of_form(
        r"[A-Za-z0-9][A-Za-z0-9._-]*",
        "letters, digits and any of . _ -, with a letter or a digit first",
    ),
]
"""Part of a key in the store: letters, digits, `.`, `_` and `-`."""
CODE_BY_NAME = "code by name, FILE.py:NAME or MODULE:NAME"
Reference = Annotated[str, of_form(r".+:\w+", CODE_BY_NAME), Place.CODE]
"""Code by name: `file.py:name` or `module:name`."""
URL = r"https?://[^\s/]+(/\S*)?"
Url = Annotated[str, of_form(URL, "a URL, http://.. or https://..")]
StoreUrl = Annotated[
    str,
    of_form(
        r"(s3|gs|az)://[^\s/]+(/\S+)?|file:/\S+",
        "s3://BUCKET/FOLDER (or gs://, az://), or file:/FOLDER",
    ),
]
"""A bucket and the folder in it, or `file:` with an absolute path."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
CountOrZero = Annotated[int, Field(ge=0)]


class Config(BaseModel):
    # Strict: "3" is not a number and true is not 1. A typo in a long run costs more than a
    # quotation mark.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def seen_from(self, folder: Path) -> Self:
        """The same config with relative paths made absolute: they start at the folder."""
        seen = {
            name: _seen_from(folder, getattr(self, name), field.metadata)
            for name, field in type(self).model_fields.items()
        }
        changed = {name: value for name, value in seen.items() if value != getattr(self, name)}
        return self.model_copy(update=changed)


def _seen_from(folder: Path, value: Any, marks: list[Any]) -> Any:
    match value:
        case Config():
            return value.seen_from(folder)
        case tuple():
            return tuple(_seen_from(folder, each, marks) for each in value)
        case str() if Place.PATH in marks or (Place.CODE in marks and is_file(value)):
            return os.path.join(folder, value)
        case _:
            return value


def is_file(reference: str) -> bool:
    """True if code is named by its file, not by its module."""
    return reference.partition(":")[0].endswith(".py")


OLD_KEYS: dict[str, str] = {
    "worlds": "sandbox",
    "invariant": "batch_invariant",
    "silence_s": "heartbeat_timeout_s",
    "trainer.weights": "trainer.published_dtype",
    "trainer.weights_dtype": "trainer.published_dtype",
    "trainer.compute": "trainer.compute_dtype",
    "sinks": "trackers",
    "sandbox.processes": "max_processes",
    "sandbox.tier": "min_isolation",
    "harness.code.answers": "user_replies",
    "harness.code.answer": "default_user_reply",
    "engine.max_batch": "max_num_seqs",
    "engine.vllm": "vllm_urls",
    "stage.lookahead": "reorder_window",
    "stage.aggregate": "loss_aggregation",
    "stage.ratio_cap": "correction_cap",
    "stage.credit": "advantage",
    "stage.explore": "fresh_frac",
    "stage.effort": "effort_penalty",
    "stage.separate": "document_mask",
    "stage.held_out": "heldout_frac",
    "stage.held_out_path": "heldout_path",
    "stage.held_out_every": "heldout_every",
    "stage.row_tokens": "seq_len",
    "stage.warmup": "warmup_steps",
    "stage.decay": "lr_schedule",
    "stage.compute": "trainer.compute_dtype",
    "stage.replay": "router_replay",
    "stage.plausible": "router_replay_min_score",
    "stage.balance": "router_balance",
}
"""Keys that had another name before -> their names now; a stage's key is listed without the stage's
kind."""

OLD_ESTIMATORS: dict[str, str] = {
    "centered": "dr_grpo",
    "leave_one_out": "rloo",
    "std_normalised": "grpo",
    "batch_normalised": "reinforce_plus_plus_baseline",
    "praise": "self_imitation",
}
