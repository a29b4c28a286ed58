"""`etude images`: build, list and inspect images for sandboxes."""

from __future__ import annotations

import asyncio
import json as json_format
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from etude.core.sandbox import SandboxSpec
from etude.factory.image_spec import read_spec
from etude.factory.images import build_image
from etude.sandbox import tells
from etude.sandbox.image import Image, ImageStore, default_store, tree_bytes, walk
from etude.sandbox.image_view import view
from etude.sandbox.namespaces import NamespaceSandboxPool


def build(*, spec: Path, store: Path | None, json: bool, console: Console) -> int:
    wanted = read_spec(spec)
    place = _store(store)
    began = time.monotonic()
    with console.status(f"building {wanted.name}") as status:

        def say(words: str) -> None:
            if words.endswith(("at work", ")")):
                console.print(words, highlight=False, markup=False, soft_wrap=True)
            status.update(f"{wanted.name}: {words}")

        image = build_image(wanted, place, say)
    took = time.monotonic() - began
    said = f"{image.reference}: {_size(image.size_bytes)} in {took:.1f} s"
    console.print(said, highlight=False, soft_wrap=True)
    console.print(
        f'to use it: [sandbox] image = "{image.name}", or SandboxSpec(image=..)',
        highlight=False,
        markup=False,
    )
    return _told(image, json)


def list(*, store: Path | None, json: bool, console: Console) -> int:
    found = _store(store).list()
    table = Table("image", "digest", "layers", "size", "system", "working copy", box=None)
    for image in found:
        kind = "its own" if image.system else "this machine's"
        work = "yes" if image.work else "-"
        row = (image.name, image.digest[:12], str(len(image.layers)), _size(image.size_bytes))
        table.add_row(*row, kind, work)
    console.print(
        table if found else "there are no images yet: build one with etude images build SPEC.toml"
    )
    if json:
        print(json_format.dumps([_record(image) for image in found]), flush=True)
    return 0


def show(*, name: str, store: Path | None, json: bool, console: Console) -> int:
    place = _store(store)
    image = place.find(name)
    console.print(image.reference, highlight=False, soft_wrap=True)
    for what, digest in [("layer", each) for each in image.layers] + [("working copy", image.work)]:
        if digest:
            layer = place.layer(digest)
            files = sum(1 for _ in walk(layer))
            said = f"{what} {digest[:12]}: {files} entries, {_size(tree_bytes(layer))}"
            console.print(said, highlight=False)
    for key, value in image.env.items():
        console.print(f"env {key}={value}", highlight=False, markup=False)
    return _told(image, json)


def lint(*, name: str, store: Path | None, json: bool, console: Console) -> int:
    """Look for signs of a sandbox in an image; returns 0 if there are none."""
    place = _store(store)
    image = place.find(name)

    async def looked() -> tells.Report:
        pool = NamespaceSandboxPool(image=view(place, image))
        try:
            async with pool.open(SandboxSpec(env=image.env)) as sandbox:
                return await tells.look(sandbox)
        finally:
            await pool.close()

    report = asyncio.run(looked())
    for each in report.tells:
        said = f"{each.name}: {each.seen or 'nothing'}  ->  {each.fix}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    found = len(report.tells)
    console.print(
        f"score {report.score:.2f}: {found} of {report.looked} tells found", highlight=False
    )
    if json:
        told = {"score": report.score, "tells": [asdict(each) for each in report.tells]}
        print(json_format.dumps(told), flush=True)
    return 1 if found else 0


def remove(*, name: str, store: Path | None, json: bool, console: Console) -> int:
    freed = _store(store).remove(name)
    console.print(f"removed {name}: {_size(freed)} freed", highlight=False)
    if json:
        print(json_format.dumps({"freed_bytes": freed}), flush=True)
    return 0


def _store(place: Path | None) -> ImageStore:
    return ImageStore(place) if place else default_store()


def _record(image: Image) -> dict[str, object]:
    return {**asdict(image), "digest": image.digest}


def _told(image: Image, json: bool) -> int:
    if json:
        print(json_format.dumps(_record(image)), flush=True)
    return 0


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
