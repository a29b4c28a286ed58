"""Workers and weight versions of a run, as far as its store knows them."""

from __future__ import annotations

from typing import Any

from etude.core.errors import EtudeError
from etude.core.types import Manifest
from etude.dash.recorded import RecordedRun
from etude.weights.manifest import Chain

NEWEST = 200
"""Number of versions that are shown."""


class Fleet:
    """The view of workers and versions. Manifests never change, so each is read once."""

    def __init__(self, recorded: RecordedRun) -> None:
        self._recorded = recorded
        self._chain = Chain(recorded.run.objects)
        self._manifests: dict[int, Manifest | None] = {}

    def page(self) -> dict[str, Any]:
        with self._recorded.lock:
            history, view = self._recorded.history, self._recorded.view
            return {
                "regions": {
                    name: {
                        "version": status.version,
                        "busy": status.busy,
                        "running": status.running,
                        "waiting": status.waiting,
                    }
                    for name, status in sorted(view.regions.items())
                },
                "slots": view.window_slots,
                "sessions": view.running,
                "workers": {
                    name: {
                        key: [round(getattr(each, key), 4) for each in line.intervals]
                        for key in ("t", "busy", "running", "waiting", "version")
                    }
                    for name, line in sorted(history.workers.items())
                },
                "versions": self._versions(),
            }

    def _versions(self) -> list[dict[str, Any]]:
        history = self._recorded.history
        try:
            lineage = self._chain.lineage()
        except EtudeError:
            lineage = {}
        newest = sorted(lineage.keys() | history.versions.keys(), reverse=True)[:NEWEST]
        found = []
        for version in newest:
            manifest = self._manifest(version, lineage.get(version))
            times = history.versions.get(version)
            found.append(
                {"version": version}
                | (_published(manifest) if manifest else {})
                | (
                    {
                        "step_done": times.step_done,
                        "stall_s": times.stall_s,
                        "live": times.live,
                        "regions": times.regions,
                    }
                    if times
                    else {}
                )
            )
        return found

    def _manifest(self, version: int, epoch: int | None) -> Manifest | None:
        if epoch is None:
            return None
        if version not in self._manifests:
            try:
                self._manifests[version] = self._chain.at(epoch, version)[1]
            except EtudeError:
                self._manifests[version] = None
        return self._manifests[version]


def _published(manifest: Manifest) -> dict[str, Any]:
    return {
        "stage": manifest.stage,
        "digest": manifest.root,
        "bytes": manifest.route.bytes,
        "whole_bytes": manifest.bytes,
        "snapshot": manifest.route.base is None,
        "published": manifest.time,
        "changed": manifest.changed,
    }
