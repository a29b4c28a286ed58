"""Builder of images from their specs: step by step, each step a layer that is kept.

The steps are a system (Debian packages or an OCI layout), Python packages, the working copy, and a
layer that makes it look lived-in. A step with the inputs of an earlier one is not repeated, even if
that was for another image, and a build that was killed continues at the first missing step.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from etude.core.errors import EtudeError
from etude.core.sandbox import Repository
from etude.factory import oci
from etude.factory.image_spec import Debian, ImageSpec, Oci, Pypi, Source
from etude.factory.install import InstallFailed, make_venv, pip
from etude.factory.lived_in import live_in, spread_times
from etude.factory.sources import fetch, git
from etude.sandbox.image import VENV, Image, ImageStore, tree_bytes
from etude.sandbox.repository import read_whole
from etude.sandbox.tree import EXECUTABLE, LINK

Say = Callable[[str], None]
Make = Callable[[Path], None]

_EMPTIED = ("dev", "proc", "sys", "tmp", "run", "var/cache/apt/archives", "var/lib/apt/lists")
"""Directories of a system that are only needed while it runs or is installed."""
_GLIBCS = (17, 24, 27, 28, 31, 34, 35, 36)


def build_image(spec: ImageSpec, store: ImageStore, say: Say) -> Image:
    """Build an image, or its missing steps. `say` is called with every step."""
    with store.building():
        return _built(spec, store, say)


def _built(spec: ImageSpec, store: ImageStore, say: Say) -> Image:
    build = _Build(spec, store, say)
    if spec.debian:
        build.add("debian", asdict(spec.debian), _debian(spec.debian, say))
    if spec.oci:
        build.add_oci(spec.oci)
    if spec.pypi:
        base = store.layer(build.layers[0]) if build.layers else None
        told = [*spec.pypi.requirements, str(sys.version_info[:2]), platform.machine()]
        build.add("pypi", told, _pypi(spec.pypi, base))
    if spec.repository:
        build.check_out(spec.repository)
    if lived_in := spec.realism:
        below = [store.layer(digest) for digest in build.layers]
        build.add("realism", asdict(lived_in), lambda made: live_in(lived_in, below, made))
    image = build.image()
    store.save(image)
    return image


class _Build:
    """The layers of an image so far."""

    def __init__(self, spec: ImageSpec, store: ImageStore, say: Say) -> None:
        self._spec = spec
        self._store = store
        self._say = say
        self.layers: list[str] = []
        self._work = ""
        self._env = dict(spec.env)

    def add(self, name: str, told: object, make: Make) -> None:
        self.layers.append(self._step(name, told, make))

    def _step(self, name: str, told: object, make: Make) -> str:
        """The layer that a step makes, now or in an earlier build. `told`: everything that it
        depends on."""
        key = _key(name, told, self.layers)
        with self._store.one_at_a_time(key):
            if (digest := self._store.made_by(key)) is not None:
                self._say(f"{name}: already built ({digest[:12]})")
                return digest
            with self._store.scratch() as scratch:
                made = scratch / "layer"
                made.mkdir()
                self._say(f"{name}: building")
                make(made)
                digest = self._store.keep(key, made)
        self._say(f"{name}: done ({digest[:12]})")
        return digest

    def add_oci(self, wanted: Oci) -> None:
        layout = Path(wanted.layout)
        told = oci.manifest_digest(layout, wanted.tag)
        self.add("oci", told, lambda made: oci.unpack(layout, wanted.tag, made))
        config = oci.read_config(layout, wanted.tag)
        self._env = {**config.env, **self._env}
        workdir = wanted.workdir or config.workdir
        if not self._spec.repository and workdir != "/":
            base = self._store.layer(self.layers[0])
            self._work = self._step("workdir", workdir, lambda made: _take_out(base, workdir, made))

    def check_out(self, source: Source) -> None:
        clones = self._store.root / "clones"
        lived_in = self._spec.realism is not None

        def make(made: Path) -> None:
            _checkout(source, clones, made, lived_in=lived_in)

        self._work = self._step("repository", [*_source_key(source), lived_in], make)

    def image(self) -> Image:
        spec = self._spec
        there = {*self.layers, self._work} - {""}
        return Image(
            name=spec.name,
            layers=tuple(self.layers),
            system=bool(spec.debian or spec.oci),
            work=self._work,
            env=self._env,
            size_bytes=sum(tree_bytes(self._store.layer(each)) for each in there),
            hostname=spec.realism.hostname if spec.realism else "localhost",
            user=spec.realism.user if spec.realism else "",
        )


def _key(name: str, told: object, below: list[str]) -> str:
    words = json.dumps([name, told, below], sort_keys=True)
    return f"{name}-{hashlib.sha256(words.encode()).hexdigest()}"


def _debian(wanted: Debian, say: Say) -> Make:
    def make(made: Path) -> None:
        if (program := shutil.which("mmdebstrap")) is None:
            raise EtudeError(
                "[debian] needs mmdebstrap, which is not installed: apt install mmdebstrap"
            )
        argv = [program, "--variant=minbase", f"--include={','.join(wanted.packages)}"]
        argv += ["--format=directory", '--aptopt=Acquire::Check-Valid-Until "false"']
        if not wanted.packages:
            argv.remove("--include=")
        _run_saying([*argv, wanted.suite, str(made), wanted.mirror], say)
        for name in _EMPTIED:
            shutil.rmtree(made / name, ignore_errors=True)
            (made / name).mkdir(parents=True, exist_ok=True)

    return make


def _run_saying(argv: list[str], say: Say) -> None:
    last: list[str] = []
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if words := line.strip():
            last = [*last[-8:], words]
            say(words[:100])
    if process.wait():
        raise EtudeError(f"{os.path.basename(argv[0])} failed: " + "; ".join(last[-4:]))


def _take_out(base: Path, workdir: str, made: Path) -> None:
    place = oci.resolve(base, workdir)
    if not place.is_dir():
        raise EtudeError(f"oci.workdir: the image has no directory {workdir}")
    shutil.copytree(place, made, symlinks=True, dirs_exist_ok=True)


def _pypi(wanted: Pypi, base: Path | None) -> Make:
    def make(made: Path) -> None:
        try:
            if base is None:
                venv = made / VENV.lstrip("/")
                make_venv(venv)
                pip(venv, "install", *wanted.requirements)
                _retarget(venv)
            else:
                _install_wheels(wanted, base, made)
        except InstallFailed as e:
            raise EtudeError(f"[pypi]: {str(e).strip()}") from e

    return make


def _retarget(venv: Path) -> None:
    """Replace the path of the Python that scripts were installed for."""
    for script in (venv / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        content = script.read_bytes()
        if content.startswith(b"#!") and os.fsencode(venv) in content:
            script.write_bytes(content.replace(os.fsencode(venv), VENV.encode()))


def _install_wheels(wanted: Pypi, base: Path, made: Path) -> None:
    """Install packages for the Python of another system, without running anything of it: packages
    that would have to be built are refused."""
    version, site, python = _python_of(base)
    target = made / site.lstrip("/")
    target.mkdir(parents=True)
    machine = platform.machine()
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBCS]
    argv = [
        each for tag in (*platforms, f"manylinux2014_{machine}") for each in ("--platform", tag)
    ]
    argv += ["--python-version", version, "--implementation", "cp", "--only-binary=:all:"]
    with_pip = made / "pip"
    make_venv(with_pip)
    pip(with_pip, "install", "--target", str(target), "--no-compile", *argv, *wanted.requirements)
    shutil.rmtree(with_pip)
    if (scripts := target / "bin").is_dir():
        place = made / "usr/local/bin"
        place.mkdir(parents=True, exist_ok=True)
        for script in scripts.iterdir():
            content = script.read_bytes()
            if content.startswith(b"#!"):
                content = re.sub(rb"\A#!.*", b"#!" + python.encode(), content)
            (place / script.name).write_bytes(content)
            (place / script.name).chmod(0o755)
        shutil.rmtree(scripts)


def _python_of(base: Path) -> tuple[str, str, str]:
    """Version of a system's Python, directory for additional packages, and its path."""
    for prefix, packages in (("/usr/local", "site-packages"), ("/usr", "dist-packages")):
        for found in sorted((base / prefix[1:] / "bin").glob("python3.*"), reverse=True):
            if match := re.fullmatch(r"python(3\.\d+)", found.name):
                version = match[1]
                return (
                    version,
                    f"/usr/local/lib/python{version}/{packages}",
                    f"{prefix}/bin/python3",
                )
    raise EtudeError("[pypi]: the system has no Python: add python3 to debian.packages")


def _source_key(source: Source) -> list[str]:
    """Identity of its current content: a folder or a branch may change later."""
    place = Path(source.source)
    if source.commit or not place.exists():
        return [source.source, source.commit]
    if (place / ".git").exists() or (place / "objects").is_dir():
        return [source.source, git(place, "rev-parse", "HEAD").decode().strip()]
    if place.is_file():
        return [hashlib.sha256(place.read_bytes()).hexdigest()]
    files = fetch(source.source, place).files
    told = sorted((path, hashlib.sha256(content).hexdigest()) for path, content in files.items())
    return [json.dumps(told)]


def _checkout(source: Source, clones: Path, made: Path, *, lived_in: bool) -> None:
    found = fetch(source.source, clones)
    if found.git is None:
        if source.commit:
            raise EtudeError(f"repository.commit: {source.source} is not a git repository")
        for path, content in found.files.items():
            place = made / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        if lived_in:
            spread_times(made, time.time())
        return
    commit = source.commit or found.origin.rpartition("@")[2]
    for path, (mode, blob) in read_whole(
        Repository(url=str(found.git.absolute()), commit=commit)
    ).items():
        place = made / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if mode == LINK:
            place.symlink_to(os.fsdecode(blob or b""))
        else:
            place.write_bytes(blob or b"")
            place.chmod(0o755 if mode == EXECUTABLE else 0o644)
    if lived_in:
        when = float(git(found.git, "log", "-1", "--format=%ct", commit))
        spread_times(made, when)
        _add_history(found.git, commit, source.source, made)


def _add_history(clone: Path, commit: str, url: str, made: Path) -> None:
    """Add the commits up to this one, and no newer objects."""
    git(clone, "update-ref", "refs/etude/base", commit)
    git(made, "init", "--quiet", "--template=", "--initial-branch=main")
    git(made, "fetch", "--quiet", "--no-tags", str(clone.absolute()), "refs/etude/base")
    git(made, "update-ref", "refs/heads/main", commit)
    git(made, "read-tree", commit)
    if "://" in url and not url.startswith("file:"):
        git(made, "remote", "add", "origin", url)
    (made / ".git" / "FETCH_HEAD").unlink()
