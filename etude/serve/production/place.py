"""Read access to the recordings of production mode, by its configuration file and the store that
the file names."""

from __future__ import annotations

from pathlib import Path

from etude.core.consent import pseudonym
from etude.core.errors import EtudeError
from etude.core.feedback import Joined
from etude.core.recorded import Sessions
from etude.serve.production.config import ProductionConfig, read_production, read_user_key
from etude.store.objects import Objects
from etude.store.production import ProductionStore


class Place:
    """The recorded sessions of production mode, opened for reading. `run`: the run's store, used if
    the file names none."""

    def __init__(self, file: Path, run: str | None) -> None:
        self.config: ProductionConfig = read_production(file)
        url = self.config.store or run
        if url is None:
            raise EtudeError(f"{file} has no store: add one, or give the run's with --run")
        self.store = ProductionStore(Objects.open(url, create=False))
        self.key = read_user_key(Path(self.config.user_key_file), create=False)

    @property
    def refused(self) -> set[str]:
        """Pseudonyms of the users and organisations that the file forbids to record."""
        consent = self.config.consent
        return {
            pseudonym(name, self.key)
            for table in (consent.users, consent.organisations)
            for name, granted in table.items()
            if not granted
        }

    def read(self) -> tuple[Sessions, Joined]:
        """All recordings that may be read, and their feedback."""
        sessions = self.store.sessions(self.refused)
        return sessions, self.store.joined(sessions, horizon_s=self.config.horizon_s)
