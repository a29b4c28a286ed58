"""`etude weights log | show | verify | fetch | compact | gc | export`: the weight versions in a store, for people."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from etude.core.errors import EtudeError
from etude.core.types import Link, Manifest, Route
from etude.model.files import SMALL, write_directory
from etude.store.objects import Missing, Objects
from etude.weights import compact as compacting
from etude.weights.cache import HostCache
from etude.weights.collect import collect
from etude.weights.follow import Follower
from etude.weights.follow import Progress as Report
from etude.weights.manifest import Chain, Gone


def open_chain(url: str) -> Chain:
    chain = Chain(Objects.open(url, create=False))
    if chain.head() is None:
        raise EtudeError(
            f"{url} holds no published weights: check the address, or wait for the trainer's first version"
        )
    return chain


def log(url: str, console: Console) -> int:
    """The chain, newest last, and who is live on what."""
    chain = open_chain(url)
    line = "{:>7}  {:14} {:>5}  {:9} {:>9} {:>8} {:>9}  {:19}  {}".format

    def say(*columns: object) -> None:
        console.print(line(*columns).rstrip(), soft_wrap=True, highlight=False)

    say("version", "made by", "epoch", "way", "size", "of all", "changed", "published (UTC)", "further ways")
    for version, epoch in chain.lineage().items():
        link, manifest = chain.at(epoch, version)
        say(
            version,
            f"{manifest.stage} {manifest.step}",
            epoch,
            _start(manifest.route),
            _size(manifest.route.bytes),
            f"1/{manifest.bytes / max(1, manifest.route.bytes):.0f}" if manifest.route.base else "all",
            f"{max(manifest.changed.values(), default=0.0):.3%}" if manifest.parent else "",
            time.strftime("%F %T", time.gmtime(manifest.time)),
            ", ".join(f"{_start(route)} {_size(route.bytes)}" for route in chain.extra_routes(link)),
        )
    for lease in chain.leases():
        left = lease.until - time.time()
        state = f"lease ends in {left:.0f} s" if left > 0 else "lease has ended"
        console.print(f"reader {lease.reader}: version {lease.version}, {state}", highlight=False)
    return 0


def show(url: str, version: int | None, console: Console) -> int:
    """One version, with what changed in it."""
    chain = open_chain(url)
    link, manifest = _find(chain, version)
    lines = {
        "version": f"{manifest.version}, epoch {manifest.epoch}, {manifest.stage} step {manifest.step}",
        "manifest": link.hash,
        "weights": f"{_size(manifest.bytes)}, root {manifest.root}",
        "parent": f"{manifest.parent.version} {manifest.parent.hash}" if manifest.parent else "none",
        "publisher": manifest.publisher,
        "published": time.strftime("%F %T UTC", time.gmtime(manifest.time)),
        "signed": "yes" if " " in manifest.seal else "no",
    }
    for name, text in lines.items():
        console.print(f"{name:10} {text}", highlight=False)
    for route in (manifest.route, *chain.extra_routes(link)):
        console.print(
            f"way        {_start(route)}, {_size(route.bytes)} in {len(route.shards)} objects", highlight=False
        )
    if manifest.parent:
        for sort, share in sorted(manifest.changed.items(), key=lambda item: -item[1]):
            console.print(f"changed    {share:9.4%} of {sort}", highlight=False)
    return 0


def verify(url: str, console: Console) -> int:
    """Every version built and checked by every way that leads to it; 1 if one of them is not what it should be."""
    chain = open_chain(url)
    follower, damaged = Follower(chain), 0
    for version, epoch in chain.lineage().items():
        link, manifest = chain.at(epoch, version)
        ways = [
            way for way in (manifest.route, *chain.extra_routes(link)) if way.base is None or _is_there(chain, way.base)
        ]
        wrong = []
        for way in ways:
            # The next version starts from this one, by the way that the trainer made: keep that follower.
            mover = follower if way is manifest.route else Follower(chain)
            try:
                if way.base is not None:
                    mover.reach(way.base)
                mover.take(link, way)
            except EtudeError:
                wrong.append(way)
        damaged += bool(wrong)
        told = f", not {', '.join(_start(way) for way in wrong)}" if wrong else ""
        console.print(
            f"version {version}: right by {len(ways) - len(wrong)} of {len(ways)} ways{told}", highlight=False
        )
    console.print("all is as it was published" if not damaged else f"{damaged} versions are damaged", highlight=False)
    return 1 if damaged else 0


def _is_there(chain: Chain, link: Link) -> bool:
    try:
        return chain.find(link.version)[0] == link
    except (Missing, Gone):
        return False


def fetch(url: str, version: int | None, cache: Path | None, console: Console) -> int:
    """Downloads and checks a version; with a cache, the workers of this host find it there."""
    chain = open_chain(url)
    _, manifest = _find(chain, version)
    began = time.monotonic()
    with _bar(console, f"version {manifest.version}") as report:
        follower = Follower(chain, cache=HostCache(cache) if cache else None, progress=report)
        follower.image(manifest.version)
    seconds = time.monotonic() - began
    console.print(
        f"version {manifest.version}: {_size(manifest.bytes)} of weights, checked, in {seconds:.1f} s", highlight=False
    )
    return 0


def compact(url: str, skip: int, every: float | None, console: Console) -> int:
    """Once; or beside a run for as long as it goes on."""
    chain = open_chain(url)
    while True:
        made = compacting.compact(chain, skip=skip)
        for way in made:
            told = f"version {way.target.version} {_start(way.route)}: {_size(way.route.bytes)}"
            console.print(told, highlight=False)
        if every is None:
            console.print(f"{len(made)} ways added", highlight=False)
            return 0
        time.sleep(every)


def gc(url: str, keep: int, grace: float, console: Console) -> int:
    done = collect(open_chain(url), keep=keep, grace_s=grace)
    console.print(
        f"{len(done.deleted)} objects deleted, {len(done.doomed)} to go after the time of grace", highlight=False
    )
    return 0


def export(url: str, version: int | None, target: Path, console: Console) -> int:
    """A Hugging Face directory of any version."""
    if target.exists():
        raise EtudeError(f"{target} is there already: give another directory, or remove it first")
    chain = open_chain(url)
    _, manifest = _find(chain, version)
    with _bar(console, f"version {manifest.version}") as report:
        tensors = Follower(chain, progress=report).fetch(manifest.version)
    small = {}
    for name in SMALL:
        with contextlib.suppress(Missing):
            small[name] = chain.objects.get(f"model/{name}")
    staging = target.with_name(f".{target.name}.part")
    write_directory(staging, small, tensors)
    staging.rename(target)
    console.print(
        f"{target}: version {manifest.version}, {len(tensors)} tensors, {_size(manifest.bytes)}", highlight=False
    )
    return 0


def _find(chain: Chain, version: int | None) -> tuple[Link, Manifest]:
    if version is not None:
        return chain.find(version)
    link = chain.head()
    assert link is not None
    return link, chain.follow(link)


@contextlib.contextmanager
def _bar(console: Console, text: str) -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _start(route: Route) -> str:
    return "whole" if route.base is None else f"from {route.base.version}"


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.4g} TB"
