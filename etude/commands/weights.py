"""`etude weights log | show | verify | fetch | compact | gc | export`: commands for the weight
versions in a store."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor

from etude.core.errors import EtudeError
from etude.core.types import Manifest, Route, VersionRef
from etude.model.directory import with_stop_tokens
from etude.model.files import write_directory
from etude.model.lora import (
    CONFIG_FILE,
    Adapter,
    LoraConfig,
    split_tensors,
    whole_model,
    write_adapter,
)
from etude.model.to_fp8 import to_fp8
from etude.store.objects import Missing, Objects
from etude.store.realtime import TrafficLog
from etude.store.runs import Run
from etude.weights import compact as compacting
from etude.weights.cache import HostCache
from etude.weights.collect import collect
from etude.weights.follow import Follower
from etude.weights.follow import Progress as Report
from etude.weights.manifest import Chain
from etude.weights.records import manifest_key, shard_key
from etude.weights.signing import Corrupt


def open_chain(url: str) -> Chain:
    chain = Chain(Objects.open(url, create=False))
    if not chain.lineage():
        if chain.keys("weights/epochs"):
            raise EtudeError(
                f"{url} holds weights in an older format, which this version of Etude cannot read"
            )
        Run(chain.objects).check_is_run()
        raise EtudeError(
            f"{url} holds no published weights: check the address, or wait for the trainer's first "
            f"version"
        )
    return chain


def log(url: str, console: Console) -> int:
    """List the chain of versions, newest last, and the version that each reader uses."""
    chain = open_chain(url)
    line = "{:>7} {:14} {:>5} {:8} {:>8} {:>6} {:>8} {:16}".format

    def say(*columns: object) -> None:
        _say(console, line(*columns).rstrip())

    say(
        "version",
        "made by",
        "epoch",
        "route",
        "size",
        "of all",
        "changed",
        "published (UTC)",
    )
    for version, epoch in chain.lineage().items():
        try:
            link, manifest = chain.at(epoch, version)
        except Missing:
            continue  # deleted after it was listed
        except Corrupt as e:
            _say(console, f"{version:>7}  {e}")
            continue
        extra = chain.check_extra_routes(link).values()
        say(
            version,
            f"{manifest.stage} {manifest.step}",
            epoch,
            _start(manifest.route),
            _size(manifest.route.bytes),
            f"1/{manifest.bytes / max(1, manifest.route.bytes):.0f}"
            if manifest.route.base
            else "all",
            f"{max(manifest.changed.values(), default=0.0):.3%}" if manifest.parent else "",
            _time(manifest.time)[:16],
        )
        for route in extra:
            if isinstance(route, Corrupt):
                _say(console, f"{'':7} unused extra route: {route}")
            else:
                _say(console, f"{'':7} also {_start(route)}, {_size(route.bytes)}")
    for lease in chain.leases().values():
        if isinstance(lease, Corrupt):
            _say(console, f"reader unknown: {lease}")
            continue
        left = lease.until - time.time()
        state = f"lease ends in {left:.0f} s" if left > 0 else "lease has ended"
        _say(console, f"reader {lease.reader}: version {lease.version}, {state}")
    return 0


def show(url: str, version: int | None, console: Console) -> int:
    """Show one version, with what changed in it."""
    chain = open_chain(url)
    link, manifest = find_version(chain, version)
    lines = {
        "version": f"{manifest.version}, epoch {manifest.epoch}, {manifest.stage} step "
        f"{manifest.step}",
        "manifest": link.hash,
        "weights": f"{_size(manifest.bytes)}, root {manifest.root}",
        "parent": f"{manifest.parent.version} {manifest.parent.hash}"
        if manifest.parent
        else "none",
        "adapter of": f"version {manifest.adapter_of.version}" if manifest.adapter_of else "",
        "publisher": manifest.publisher,
        "published": f"{_time(manifest.time)} UTC",
        "signed": "yes" if " " in manifest.seal else "no",
    }
    for name, text in lines.items():
        if text:
            _say(console, f"{name:10} {text}")
    for route in (manifest.route, *chain.extra_routes(link)):
        _say(
            console,
            f"route        {_start(route)}, {_size(route.bytes)} in {len(route.shards)} objects",
        )
    if manifest.parent:
        for sort, share in sorted(manifest.changed.items(), key=lambda item: -item[1]):
            _say(console, f"changed    {share:9.4%} of {sort}")
    return 0


def verify(url: str, console: Console) -> int:
    """Build and check every version by every route that leads to it. Returns 1 if any of them is
    damaged."""
    chain = open_chain(url)
    follower, damaged = Follower(chain), 0
    lineage = chain.lineage()
    oldest = min(lineage)
    for version, epoch in lineage.items():
        try:
            link, manifest = chain.at(epoch, version)
        except Missing:
            if not chain.exists(manifest_key(lineage[oldest], oldest)):
                continue  # deleted after it was listed; the oldest goes first
            told = "its manifest is missing"
            is_right = False
            lost = [manifest_key(epoch, version)]
        except Corrupt as e:
            told = str(e)
            is_right = False
            lost = [manifest_key(epoch, version)]
        else:
            told, is_right, lost = _check_version(chain, follower, link, manifest)
        damaged += not is_right
        _say(console, f"version {version}: {told}")
        for key in lost:
            _say(console, f"  restore {key}")
    _say(
        console,
        "all weights are as published" if not damaged else f"{damaged} versions are damaged",
    )
    return 1 if damaged else 0


def _check_version(
    chain: Chain, follower: Follower, link: VersionRef, manifest: Manifest
) -> tuple[str, bool, list[str]]:
    """The report on a version, True if it is sound, and the keys of objects to restore."""
    extra = chain.check_extra_routes(link)
    routes = [manifest.route, *(route for route in extra.values() if isinstance(route, Route))]
    unread = [key for key, route in extra.items() if isinstance(route, Corrupt)]
    # A base that was too old is deleted, and so routes from it no longer count.
    routes = [
        route
        for route in routes
        if route.base is None or chain.exists(manifest_key(route.base.epoch, route.base.version))
    ]
    # The next version starts from this one by the trainer's route, so keep that follower.
    wrong = [
        route
        for route in routes
        if not _reaches(follower if route is manifest.route else Follower(chain), link, route)
    ]
    lost = [*unread, *_lost(chain, link, manifest, wrong)]
    right = len(routes) - len(wrong)
    if not routes and manifest.parent is not None:
        lost.append(manifest_key(manifest.parent.epoch, manifest.parent.version))
    failed = ", ".join([*map(_start, wrong), *unread])
    told = (
        f"correct by {right} of {len(routes) + len(unread)} "
        f"routes{f', not {failed}' if failed else ''}"
    )
    return told, bool(right) and not failed, lost


def _reaches(follower: Follower, link: VersionRef, route: Route) -> bool:
    try:
        if route.base is not None:
            follower.move_to(route.base)
        follower.apply_route(link, route)
    except EtudeError:
        return False
    return True


def _lost(
    chain: Chain, link: VersionRef, manifest: Manifest, wrong: Sequence[Route]
) -> Iterator[str]:
    """The damaged objects on broken routes; none if it is the base that cannot be built."""
    for hash in dict.fromkeys(
        hash for route in wrong for hash in (manifest.root, *(shard.hash for shard in route.shards))
    ):
        try:
            chain.shard(link, hash)
        except (Missing, Corrupt):
            yield shard_key(link.epoch, link.version, hash)


def fetch(url: str, version: int | None, cache: Path | None, console: Console) -> int:
    """Download and check a version. With a cache, the workers of this host find it there."""
    chain = open_chain(url)
    _, manifest = find_version(chain, version)
    began = time.monotonic()
    with _bar(console, f"version {manifest.version}") as report:
        follower = Follower(chain, cache=HostCache(cache) if cache else None, progress=report)
        follower.image(manifest.version)
    seconds = time.monotonic() - began
    _say(
        console,
        f"version {manifest.version}: {_size(manifest.bytes)} of weights, checked, in "
        f"{seconds:.1f} s",
    )
    return 0


def compact(url: str, skip: int, every: float | None, console: Console) -> int:
    """Add routes once; or with `every`, again and again, next to a run."""
    chain = open_chain(url)
    while True:
        made = compacting.compact(chain, skip=skip)
        for route in made:
            _say(
                console,
                f"version {route.target.version} {_start(route.route)}: {_size(route.route.bytes)}",
            )
        if every is None:
            _say(console, f"{len(made)} routes added")
            return 0
        time.sleep(every)


def gc(url: str, keep: int, grace: float, console: Console) -> int:
    chain = open_chain(url)
    change = TrafficLog(chain.objects).newest()
    # A pool's worker that restarts needs the version that its users get, however old.
    served = change.traffic.pools.values() if change is not None else ()
    done = collect(chain, keep=keep, served=served, grace_s=grace)
    _say(
        console,
        f"{len(done.deleted)} objects deleted, {len(done.pending)} more after the grace period",
    )
    return 0


def export(
    url: str, version: int | None, target: Path, dtype: str, console: Console, *, adapter: bool
) -> int:
    """Write a version as a Hugging Face directory, in bf16 or FP8. If the version is an adapter, it
    is merged into its base; or, with `adapter`, written on its own in PEFT's format."""
    if target.exists():
        raise EtudeError(f"{target} already exists: choose another directory, or remove it first")
    chain = open_chain(url)
    _, manifest = find_version(chain, version)
    with _bar(console, f"version {manifest.version}") as report:
        tensors = Follower(chain, progress=report).fetch(manifest.version)
    _say(console, f"writing version {manifest.version} to {target}")
    small = Run(chain.objects).model_files()
    staging = target.with_name(f".{target.name}.part")
    shutil.rmtree(staging, ignore_errors=True)  # left by an interrupted export
    if adapter:
        told = _write_adapter(staging, manifest, small, tensors, url)
        staging.rename(target)
        _say(console, f"{target}: {told}")
        return 0
    tensors = dict(whole_model(small, tensors))
    small.pop(CONFIG_FILE, None)
    if "tokenizer.json" in small:  # a store may contain only weights
        small = with_stop_tokens(small)
    if dtype == "fp8":
        try:
            small, tensors = to_fp8(small, tensors)
        except (ValueError, KeyError) as e:
            raise EtudeError(f"version {manifest.version} cannot be exported in FP8: {e}") from e
    write_directory(staging, small, tensors)
    staging.rename(target)
    _say(
        console,
        f"{target}: version {manifest.version}, {len(tensors)} tensors, "
        f"{_size(sum(tensor.nbytes for tensor in tensors.values()))}",
    )
    return 0


def _write_adapter(
    target: Path,
    manifest: Manifest,
    small: Mapping[str, bytes],
    tensors: Mapping[str, Tensor],
    url: str,
) -> str:
    if manifest.adapter_of is None:
        raise EtudeError(
            f"version {manifest.version} of {url} is not an adapter: it has all weights; leave "
            "out --adapter"
        )
    config = LoraConfig.from_json(small[CONFIG_FILE])
    own = split_tensors(tensors)[1]
    base = json.loads(small[CONFIG_FILE])["base_model_name_or_path"]
    write_adapter(target, Adapter(config, own), base)
    return (
        f"version {manifest.version}, {len(own)} tensors, {_size(manifest.bytes)}, an adapter of "
        f"version {manifest.adapter_of.version}"
    )


def find_version(chain: Chain, version: int | None) -> tuple[VersionRef, Manifest]:
    if version is not None:
        return chain.find(version)
    link = chain.head()
    assert link is not None
    return link, chain.follow(link)


@contextlib.contextmanager
def _bar(console: Console, text: str) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _say(console: Console, text: str) -> None:
    """Print a line literally: text from a store, which anybody may have written, must not format
    the output or control the terminal."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    console.print(shown, soft_wrap=True, highlight=False, markup=False, emoji=False)


def _time(seconds: float) -> str:
    try:
        return time.strftime("%F %T", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "at no time"


def _start(route: Route) -> str:
    return "whole" if route.base is None else f"from {route.base.version}"


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.4g} TB"
