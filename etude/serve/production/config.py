"""The configuration file of production mode: who may be recorded, what is redacted, and how long
recordings are kept."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from etude.core.consent import DAY_S
from etude.core.errors import EtudeError
from etude.core.redaction import KINDS, Redactor

KEY_BYTES = 32


class ConsentConfig(msgspec.Struct, forbid_unknown_fields=True):
    header: bool = True
    """Trust the header `X-Etude-Consent` of requests."""
    users: dict[str, bool] = {}
    organisations: dict[str, bool] = {}


class RedactionConfig(msgspec.Struct, forbid_unknown_fields=True):
    kinds: list[str] = msgspec.field(default_factory=lambda: list(KINDS))
    patterns: dict[str, str] = {}
    """Additional patterns to redact: regular expressions by name."""


class ProductionConfig(msgspec.Struct, forbid_unknown_fields=True):
    user_key_file: str
    """File with the key of the pseudonyms, created at the first start. It must not lie in the
    store. Without the key nobody can be found any more, not even to be deleted."""
    store: str | None = None
    """The store for recordings; the run's own store by default."""
    sampling_rate: float = 1.0
    retention_days: float = 30.0
    pending_hours: float = 24.0
    """Time for which feedback waits for an answer that is not known yet."""
    session_idle_minutes: float = 30.0
    """Time after which an idle session is over and leaves memory."""
    feedback_per_minute: float = 60.0
    """Per user."""
    consent: ConsentConfig = msgspec.field(default_factory=ConsentConfig)
    redaction: RedactionConfig = msgspec.field(default_factory=RedactionConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.sampling_rate <= 1:
            raise ValueError("sampling_rate must be between 0 and 1")
        for name in ("retention_days", "pending_hours", "session_idle_minutes"):
            if not 0 < getattr(self, name) < 1e6:
                raise ValueError(f"{name} must be above 0")
        if not 0 < self.feedback_per_minute < 1e6:
            raise ValueError("feedback_per_minute must be above 0")
        self.redactor()

    @property
    def retention_s(self) -> float:
        return self.retention_days * DAY_S

    @property
    def horizon_s(self) -> float:
        return self.pending_hours * 3600

    def redactor(self) -> Redactor:
        return Redactor(self.redaction.kinds, self.redaction.patterns)


def read_production(path: Path) -> ProductionConfig:
    """Read the file. Paths in it are relative to its own directory."""
    try:
        config = msgspec.toml.decode(path.read_bytes(), type=ProductionConfig)
    except OSError as e:
        raise EtudeError(f"cannot read {path}: {e.strerror}; see docs/production.md") from e
    except (msgspec.MsgspecError, ValueError) as e:
        raise EtudeError(f"{path}: {e}; see docs/production.md") from e
    config.user_key_file = str(path.parent / config.user_key_file)
    if config.store is not None and "://" not in config.store:
        config.store = str(path.parent / config.store)
    return config


def read_user_key(path: Path, *, create: bool) -> bytes:
    """The key of the pseudonyms. If two processes create it at once, both get the same key."""
    if create and not path.exists():
        part = path.with_name(f"{path.name}.{os.getpid()}")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
        try:
            os.link(part, path)
        except FileExistsError:
            pass
        finally:
            part.unlink()
    try:
        key = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as e:
        raise EtudeError(
            f"{path} has no readable pseudonym key ({e}): restore it from a backup; with a new "
            f"key, users who were recorded before cannot be found again"
        ) from e
    if len(key) < KEY_BYTES:
        raise EtudeError(f"{path}: the key must have {KEY_BYTES} bytes, in hexadecimal")
    return key
