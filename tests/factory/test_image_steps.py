"""The steps of an image, with programs that only record their arguments."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import EtudeError
from etude.factory import images, install, sources
from etude.factory.image_spec import Debian, ImageSpec, Pypi, Realism, Source
from etude.factory.images import build_image
from etude.factory.install import Installed, InstallFailed, PipInstaller
from etude.factory.oci import manifest_digest, read_config, unpack
from etude.sandbox.image import VENV, ImageStore
from tests.factory.test_images import layer_of, make_layout

MACHINE = {"aarch64": "arm64", "x86_64": "amd64"}.get(platform.machine(), platform.machine())


def program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


DEBOOT = """
for last in "$@"; do before=$place; place=$last; done
printf '%s\\n' "$@" > {log}
mkdir -p "$before/etc" "$before/tmp/left" "$before/var/lib/apt/lists/x"
echo debian > "$before/etc/os"
echo installed
"""


@pytest.mark.parametrize("packages", [(), ("git", "python3")])
def test_a_system_is_installed_and_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...]
) -> None:
    log = tmp_path / "log"
    program(tmp_path / "bin", "mmdebstrap", DEBOOT.format(log=log), monkeypatch)
    store, said = ImageStore(tmp_path / "store"), list[str]()
    spec = ImageSpec(
        name="a", debian=Debian(suite="bookworm", packages=packages, mirror="http://m")
    )
    image = build_image(spec, store, said.append)
    layer = store.layer(image.layers[0])
    argv = log.read_text().splitlines()
    assert argv[0] == "--variant=minbase" and "--format=directory" in argv
    assert ("--include=git,python3" in argv) is bool(packages)
    assert any(each.startswith("--include") for each in argv) is bool(packages)
    assert (argv[-3], argv[-1]) == ("bookworm", "http://m")
    assert (layer / "etc" / "os").read_text() == "debian\n"
    for name in ("dev", "proc", "sys", "tmp", "run", "var/lib/apt/lists"):
        assert list((layer / name).iterdir()) == []
    assert image.system and image.work == "" and "installed" in said


def test_a_system_needs_its_installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images.shutil, "which", lambda name: None)
    with pytest.raises(EtudeError, match="apt install mmdebstrap"):
        build_image(ImageSpec(name="a", debian=Debian()), ImageStore(tmp_path), print)


def test_packages_are_installed_where_the_image_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def pip(venv: Path, *argv: str) -> str:
        asked.append(argv)
        (venv / "bin" / "tool").write_text(f"#!{venv}/bin/python\n")
        if "broken" in argv:
            raise InstallFailed(" no such package\n")
        return ""

    monkeypatch.setattr(images, "pip", pip)
    store = ImageStore(tmp_path / "store")
    image = build_image(ImageSpec(name="a", pypi=Pypi(requirements=("six", "x==1"))), store, print)
    assert asked == [("install", "six", "x==1")]
    layer = store.layer(image.layers[0])
    assert (layer / VENV.lstrip("/") / "bin" / "tool").read_text() == f"#!{VENV}/bin/python\n"
    with pytest.raises(EtudeError, match=r"^\[pypi\]: no such package$"):
        build_image(ImageSpec(name="b", pypi=Pypi(requirements=("broken",))), store, print)


def test_a_folder_becomes_a_working_copy(tmp_path: Path) -> None:
    source, store = tmp_path / "shop", ImageStore(tmp_path / "store")
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "a.py").write_text("x = 1\n")
    image = build_image(
        ImageSpec(name="a", repository=Source(source=str(source)), realism=Realism()), store, print
    )
    copy = store.layer(image.work)
    assert (copy / "inner" / "a.py").read_text() == "x = 1\n" and not (copy / ".git").exists()
    assert (image.hostname, image.user) == ("devbox", "dev")
    with pytest.raises(EtudeError, match="is not a git repository"):
        spec = ImageSpec(name="b", repository=Source(source=str(source), commit="0" * 40))
        build_image(spec, store, print)


def put(layout: Path, content: Any) -> str:
    data = json.dumps(content).encode()
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs" / "sha256" / digest).write_bytes(data)
    return f"sha256:{digest}"


def test_an_image_is_found_by_its_tag_and_its_machine(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "layout", layer_of(("a", b"1")), workdir="/w")
    (only,) = json.loads((layout / "index.json").read_text())["manifests"]
    assert manifest_digest(layout, "") == only["digest"]
    assert read_config(layout, "").workdir == "/w" and read_config(layout, "").env == {"A": "1"}
    machines = [{"digest": "sha256:0", "platform": {"architecture": "m68k"}},
                {"digest": only["digest"], "platform": {"architecture": MACHINE}}]  # fmt: skip
    name = "org.opencontainers.image.ref.name"
    entries = [
        {"digest": put(layout, {"manifests": machines}), "annotations": {name: "many"}},
        {"digest": put(layout, {"manifests": machines[:1]}), "annotations": {name: "other"}},
        {"digest": put(layout, {"layers": [{"digest": "x", "mediaType": "tar+zstd"}]})},
    ]
    (layout / "index.json").write_text(json.dumps({"manifests": entries}))
    assert manifest_digest(layout, "many") == only["digest"]
    unpack(layout, "many", tmp_path)
    assert (tmp_path / "a").read_text() == "1"
    for tag, why in (
        ("other", f"no image for {MACHINE} machines"),
        ("", r"must match exactly one image; available: \(none\), many, other"),
        ("gone", "oci.tag 'gone' must match exactly one image"),
    ):
        with pytest.raises(EtudeError, match=why):
            manifest_digest(layout, tag)
    (layout / "index.json").write_text(json.dumps({"manifests": entries[2:]}))
    with pytest.raises(EtudeError, match="copy it with gzip"):
        unpack(layout, "", tmp_path)


@pytest.mark.parametrize("index", [None, "{", "{}"])
def test_what_is_no_layout(tmp_path: Path, index: str | None) -> None:
    if index is not None:
        (tmp_path / "index.json").write_text(index)
    with pytest.raises(EtudeError, match="is not an OCI layout"):
        manifest_digest(tmp_path, "")


def test_blobs_are_there_and_whole(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "layout", layer_of(("a", b"1")))
    (only,) = json.loads((layout / "index.json").read_text())["manifests"]
    for digest, why in (("sha256:" + "0" * 64, "is missing"), ("md5:0", "is missing")):
        (layout / "index.json").write_text(json.dumps({"manifests": [{"digest": digest}]}))
        with pytest.raises(EtudeError, match=why):
            manifest_digest(layout, "")
    (layout / "index.json").write_text(json.dumps({"manifests": [only]}))
    (layout / "blobs" / "sha256" / only["digest"][7:]).write_text("{}")
    with pytest.raises(EtudeError, match="is broken; copy the image again"):
        manifest_digest(layout, "")


def test_members_of_a_layer_keep_their_times_and_rights_and_links(tmp_path: Path) -> None:
    packed = tmp_path / "layer.tar"
    with tarfile.open(packed, "w") as archive:
        for name, kind, link in (
            ("bin/run", tarfile.REGTYPE, ""), ("bin/same", tarfile.LNKTYPE, "bin/run"),
            ("dev/tty", tarfile.CHRTYPE, ""), (".", tarfile.DIRTYPE, ""),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode, info.mtime = kind, link, 0o6751, 1_000_000_000
            archive.addfile(info)
    layout = make_layout(tmp_path / "layout", packed.read_bytes())
    root = tmp_path / "root"
    root.mkdir()
    unpack(layout, "", root)
    found = (root / "bin" / "run").stat()
    assert (found.st_mode & 0o7777, found.st_mtime) == (0o751, 1_000_000_000)
    assert os.path.samefile(root / "bin" / "run", root / "bin" / "same")
    assert not (root / "dev" / "tty").exists() and (root / "dev").is_dir()


def test_pip_is_run_for_an_environment_and_its_failure_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    ends = [(0, "good"), (1, "x" * 4000 + "bad")]

    class Ran:
        def __init__(self, argv: list[str], **how: Any) -> None:
            asked.append(argv)
            self.returncode, self.stdout = ends.pop(0)
            self.stderr = "!"

    monkeypatch.setattr(install.subprocess, "run", Ran)
    assert install.pip(tmp_path, "install", "six") == "good"
    assert asked[0][:5] == [sys.executable, "-m", "pip", "--python", f"{tmp_path}/bin/python"]
    assert asked[0][5:] == ["install", "six", "-q", "--disable-pip-version-check", "--no-input"]
    with pytest.raises(InstallFailed) as caught:
        install.pip(tmp_path, "freeze")
    assert str(caught.value).endswith("xbad!") and len(str(caught.value)) == 3000


def test_the_same_environment_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "pip", lambda place, *argv: asked.append(argv) or "")
    installed = Installed(requirements=("a==1",), generated={}, metadata={"a.dist-info/M": b"x"})
    PipInstaller().install_again(installed, tmp_path / "venv")
    assert asked == [("install", "--no-deps", "a==1")]
    assert len([*(tmp_path / "venv").rglob("site-packages/a.dist-info/M")]) == 1


def test_what_git_says_last_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EtudeError, match=f"^git rev-parse in {tmp_path}: "):
        sources.git(tmp_path, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EtudeError, match="git is not installed"):
        sources.git(tmp_path, "status")


def test_what_cannot_be_downloaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"x")
    assert sources._download(f"file://{tmp_path}/there") == b"x"
    with pytest.raises(EtudeError, match="gone cannot be fetched"):
        sources._download(f"file://{tmp_path}/gone")
