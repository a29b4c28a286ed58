"""What production mode recorded, for whoever may read it: a file of production mode, and the store
that it names."""

from __future__ import annotations

from pathlib import Path

from etude.core.consent import Tombstone, pseudonym
from etude.core.errors import EtudeError
from etude.core.feedback import Joined
from etude.core.recorded import Sessions
from etude.serve.production.config import ProductionConfig, read_production, read_user_key
from etude.store.objects import Objects
from etude.store.production import ProductionStore


class Place:
    """`run`: the store of the run, if the file names none. `remembers`: as of `ProductionStore`."""

    def __init__(self, file: Path, run: str | None, *, remembers: bool = False) -> None:
        self.config: ProductionConfig = read_production(file)
        url = self.config.store or run
        if url is None:
            raise EtudeError(f"{file} names no store: give that of the run, with --run")
        self.store = ProductionStore(Objects.open(url, create=False), remembers=remembers)
        self.key = read_user_key(Path(self.config.user_key_file), create=False)

    def read(self) -> tuple[Sessions, Joined]:
        consent = self.config.consent
        refused = {
            pseudonym(name, self.key)
            for table in (consent.users, consent.organisations)
            for name, granted in table.items()
            if not granted
        }
        sessions = self.store.sessions(refused)
        return sessions, self.store.joined(sessions, horizon_s=self.config.horizon_s)

    def tombstones(self) -> dict[str, Tombstone]:
        return self.store.tombstones()
