"""Images: built once, in steps that are kept, from untrusted files."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from etude.core.errors import EtudeError
from etude.factory import images
from etude.factory.image_spec import ImageSpec, Oci, Pypi, Realism, Source, read_spec
from etude.factory.images import build_image
from etude.factory.lived_in import live_in, spread_times
from etude.factory.oci import unpack
from etude.sandbox.image import ImageStore, tree_digest


def quiet(words: str) -> None: ...


def git(folder: Path, *argv: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *name, *argv], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, list[str]]:
    place = tmp_path / "shop"
    place.mkdir()
    git(place, "init", "-q")
    commits = []
    for number in range(3):
        (place / "cart.py").write_text(f"TOTAL = {number}\n")
        (place / "run.sh").write_text("#!/bin/sh\n")
        (place / "run.sh").chmod(0o755)
        git(place, "add", ".")
        git(place, "commit", "-q", "-m", f"number {number}")
        commits.append(git(place, "rev-parse", "HEAD"))
    return place, commits


def spec_of(place: Path, commit: str, name: str = "shop", **more: object) -> ImageSpec:
    return ImageSpec(name=name, repository=Source(source=str(place), commit=commit), **more)  # type: ignore[arg-type]


def test_a_commit_becomes_a_layer_that_is_made_once(
    tmp_path: Path, repository: tuple[Path, list[str]]
) -> None:
    place, commits = repository
    store = ImageStore(tmp_path / "store")
    image = build_image(spec_of(place, commits[1]), store, quiet)
    layer = store.layer(image.work)
    assert (layer / "cart.py").read_text() == "TOTAL = 1\n"
    assert (layer / "run.sh").stat().st_mode & 0o111 and not (layer / ".git").exists()
    said: list[str] = []
    again = build_image(spec_of(place, commits[1], name="other"), store, said.append)
    assert said == [f"repository: already built ({image.work[:12]})"]
    assert again.digest == image.digest and store.find(image.reference) == image
    other = build_image(spec_of(place, commits[2]), store, quiet)
    assert other.digest != image.digest
    with pytest.raises(EtudeError, match="the task needs sha256"):
        store.find(image.reference)


def test_a_build_that_broke_off_goes_on(
    tmp_path: Path, repository: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, commits = repository
    store = ImageStore(tmp_path / "store")
    wanted = spec_of(place, commits[0], realism=Realism())
    with monkeypatch.context() as broken:
        broken.setattr(images, "live_in", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            build_image(wanted, store, quiet)
    assert store.list() == []
    (store.root / "scratch" / "999999999-left").mkdir()
    said: list[str] = []
    build_image(wanted, store, said.append)
    assert said[0].startswith("repository: already built") and said[1] == "realism: building"
    assert list((store.root / "scratch").iterdir()) == []


def test_what_is_being_made_stays_whoever_makes_it(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    with store.scratch() as mine:
        # a process number of a container means nothing here
        theirs = mine.rename(mine.with_name("999999999-x"))
        (store.root / "scratch" / "left").mkdir()
        with store.scratch():
            assert theirs.is_dir() and not (store.root / "scratch" / "left").exists()
    with store.scratch():
        assert not theirs.exists()


def test_what_only_one_image_has_goes_with_it(
    tmp_path: Path, repository: tuple[Path, list[str]]
) -> None:
    place, commits = repository
    store = ImageStore(tmp_path / "store")
    one = build_image(spec_of(place, commits[0], name="one"), store, quiet)
    build_image(spec_of(place, commits[0], name="two"), store, quiet)
    build_image(spec_of(place, commits[1], name="one"), store, quiet)
    build_image(spec_of(place, commits[0], name="one"), store, quiet)
    assert len(list((store.root / "layers").iterdir())) == 2
    assert store.remove("one") > 0 and store.layer(one.work).is_dir()
    assert len(list((store.root / "layers").iterdir())) == 1
    assert store.remove("two") > 0 and not store.layer(one.work).exists()
    with pytest.raises(EtudeError, match="etude images build"):
        store.find("two")


def test_history_ends_at_the_commit(tmp_path: Path, repository: tuple[Path, list[str]]) -> None:
    place, commits = repository
    store = ImageStore(tmp_path / "store")
    image = build_image(spec_of(place, commits[1], realism=Realism()), store, quiet)
    layer = store.layer(image.work)
    assert git(layer, "-c", "safe.directory=*", "rev-list", "--all").split() == commits[1::-1]
    objects = git(layer, "cat-file", "--batch-check", "--batch-all-objects")
    assert commits[2] not in objects and commits[0] in objects
    assert git(layer, "status", "--porcelain") == ""


def test_times_and_owners_do_not_change_a_digest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "file").write_text("x")
        (tmp_path / name / "link").symlink_to("inner")
    (tmp_path / "b" / "inner").touch()
    assert tree_digest(tmp_path / "a") == tree_digest(tmp_path / "b")
    (tmp_path / "b" / "inner" / "file").chmod(0o755)
    assert tree_digest(tmp_path / "a") != tree_digest(tmp_path / "b")


def test_a_digest_is_the_same_on_every_machine(tmp_path: Path) -> None:
    """It identifies layers, wherever they were built."""
    for name in ("b", "a/c", "a/d"):
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(name)
        place.chmod(0o644)
    (tmp_path / "a").chmod(0o755)
    (tmp_path / "link").symlink_to("a/c")
    assert tree_digest(tmp_path).startswith("e938da8f4a09e850")


def test_somebody_lives_there(tmp_path: Path) -> None:
    live_in(Realism(user="maria", hostname="thinkpad"), [], tmp_path)
    home = tmp_path / "etc" / "skel"
    told = git(tmp_path, "config", "--file", str(home / ".gitconfig"), "--list").splitlines()
    assert told == ["user.name=Maria", "user.email=maria@thinkpad"]
    assert (tmp_path / "etc" / "hostname").read_text() == "thinkpad\n"
    assert len((tmp_path / "etc" / "machine-id").read_text()) == 33
    for name in (".bashrc", ".profile", ".bash_history"):
        subprocess.run(["bash", "-n", home / name], check=True)
        assert (home / name).read_text()


def test_packages_are_added_to_the_python_of_another_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wheels for it, since nothing of it is run; scripts start with its Python, not with
    ours."""
    base, made = tmp_path / "base", tmp_path / "made"
    (base / "usr/bin").mkdir(parents=True)
    for name in ("python3", "python3.12", "python3-config"):
        (base / "usr/bin" / name).touch()
    asked: list[str] = []

    def pip(venv: Path, *argv: str) -> None:
        asked.extend(argv)
        target = Path(argv[argv.index("--target") + 1])
        (target / "bin").mkdir()
        (target / "shop.py").touch()
        (target / "bin" / "shop").write_text(f"#!{venv}/bin/python\nimport shop\n")

    monkeypatch.setattr(images, "make_venv", lambda venv: venv.mkdir(parents=True))
    monkeypatch.setattr(images, "pip", pip)
    images._pypi(Pypi(requirements=("shop>=1", "six")), base)(made)
    assert asked[0] == "install" and asked[-2:] == ["shop>=1", "six"]
    assert asked[asked.index("--python-version") + 1] == "3.12" and "--only-binary=:all:" in asked
    found = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    script = made / "usr/local/bin/shop"
    assert found == {"usr/local/lib/python3.12/dist-packages/shop.py", "usr/local/bin/shop"}
    assert script.read_text() == "#!/usr/bin/python3\nimport shop\n"
    assert script.stat().st_mode & 0o777 == 0o755


def layer_of(*members: tuple[str, bytes | str | None]) -> bytes:
    """A layer with these members. Bytes: a file. Text: a link. None: a directory."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.mode = 0o4755
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            elif content is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(content)
            data = content if isinstance(content, bytes) else b""
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(packed.getvalue())


def make_layout(place: Path, *layers: bytes, workdir: str = "/") -> Path:
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    config = put(json.dumps({"config": {"Env": ["A=1"], "WorkingDir": workdir}}).encode())
    manifest = {"config": config, "layers": [put(each) for each in layers]}
    entry = put(json.dumps(manifest).encode())
    (place / "index.json").write_text(json.dumps({"manifests": [entry]}))
    return place


def test_layers_of_an_oci_image_lie_over_each_other(tmp_path: Path) -> None:
    layout = make_layout(
        tmp_path / "layout",
        layer_of(("etc/a", b"1"), ("etc/b", b"2"), ("opt/x/y", b"3"), ("var/run", "/run")),
        layer_of(("etc/.wh.b", b""), ("opt/x/.wh..wh..opq", b""), ("opt/x/z", b"4")),
        layer_of(("var/run/pid", b"5")),
    )
    root = tmp_path / "root"
    root.mkdir()
    unpack(layout, "", root)
    found = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert found == {"etc/a", "opt/x/z", "run/pid"}
    assert not (root / "etc" / "a").stat().st_mode & 0o4000


@pytest.mark.parametrize("below", [b"a file", "/etc", "/nowhere", None])
def test_a_directory_takes_the_place_of_what_was_there(
    tmp_path: Path, below: bytes | str | None
) -> None:
    """Of a link too: otherwise later entries would end up at the link's target."""
    layout = make_layout(
        tmp_path / "layout",
        layer_of(("etc/a", b"1"), ("opt", below)),
        layer_of(("opt", None), ("opt/b", b"2")),
    )
    root = tmp_path / "root"
    root.mkdir()
    unpack(layout, "", root)
    assert not (root / "opt").is_symlink()
    assert {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()} == {"etc/a", "opt/b"}


@pytest.mark.parametrize(
    "members",
    [
        [("../../out", b"x")],
        [("/out", b"x")],
        [("a", "/"), ("a/../../../out", b"x")],
        [("up", "../../.."), ("up/out", b"x")],
        [("up", "../../../out"), ("up", b"x")],
    ],
)
def test_nothing_of_an_oci_image_leaves_its_directory(
    tmp_path: Path, members: list[tuple[str, bytes | str]]
) -> None:
    root = tmp_path / "a" / "root"
    root.mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    layout = make_layout(tmp_path / "layout", layer_of(*members))
    unpack(layout, "", root)
    inside = set(root.rglob("*")) | set(layout.rglob("*")) | {layout}
    assert set(tmp_path.rglob("*")) == before | inside
    assert not Path("/out").exists()


def test_what_a_layer_removes_is_of_those_below(tmp_path: Path) -> None:
    layout = make_layout(
        tmp_path / "layout",
        layer_of(("a/old", b"1"), ("a/in/old", b"1"), ("b/old", b"1"), ("c", b"old")),
        layer_of(
            ("a/new", b"2"), ("a/in/new", b"2"), ("a/.wh..wh..opq", b""),
            ("b/new", b"2"), (".wh.b", b""), ("c", b"new"), (".wh.c", b""),
        ),
    )  # fmt: skip
    root = tmp_path / "root"
    root.mkdir()
    unpack(layout, "", root)
    found = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert found == {"a/new", "a/in/new", "b/new", "c"}
    assert (root / "c").read_bytes() == b"new"


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "a/.wh..."])
def test_a_layer_removes_nothing_but_what_it_names(tmp_path: Path, name: str) -> None:
    root = tmp_path / "beside" / "root"
    root.mkdir(parents=True)
    (tmp_path / "beside" / "other").write_text("x")
    layout = make_layout(tmp_path / "layout", layer_of(("kept", b"1")), layer_of((name, b"")))
    with pytest.raises(EtudeError, match="removes"):
        unpack(layout, "", root)
    assert (root / "kept").exists() and (tmp_path / "beside" / "other").exists()


def test_links_in_a_circle_and_broken_blobs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    circle = make_layout(tmp_path / "circle", layer_of(("a", "b"), ("b", "a"), ("a/x", b"")))
    with pytest.raises(EtudeError, match="circle"):
        unpack(circle, "", tmp_path / "root")
    broken = make_layout(tmp_path / "broken", layer_of(("a", b"1")))
    for blob in (broken / "blobs" / "sha256").iterdir():
        if blob.read_bytes()[:2] == b"\x1f\x8b":
            blob.write_bytes(b"\x1f\x8bother")
    with pytest.raises(EtudeError, match="broken"):
        unpack(broken, "", tmp_path / "root")


def test_a_working_directory_of_an_oci_image_is_the_working_copy(tmp_path: Path) -> None:
    layout = make_layout(
        tmp_path / "layout",
        layer_of(("testbed/a.py", b"A = 1"), ("etc/a", b"1")),
        workdir="/testbed",
    )
    store = ImageStore(tmp_path / "store")
    spec = ImageSpec(name="oci", oci=Oci(layout=str(layout)), env={"B": "2"})
    image = build_image(spec, store, quiet)
    assert (store.layer(image.work) / "a.py").read_text() == "A = 1"
    assert image.system and image.env == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('name = "a"', "give at least one of"),
        ('name = "a"\n[pypi]\nrequirments = []', "requirments is an unknown key"),
        ('name = "a"\n[pypi]\nrequirements = "pytest"', "a list of strings"),
        (
            'name = "a"\n[pypi]\nrequirements = ["pytest", 3]',
            "requirements must be a string, not 3",
        ),
        ('name = "a"\npypi = ["pytest"]', "pypi must be a table"),
        ('name = "a"\nenv = ["A=1"]', "env must be a table"),
        ("name = 3", "name must be a string, not 3"),
        ('name = "a"\n[repository]\nsource = 3', "repository.source must be a string, not 3"),
        ('[pypi]\nrequirements = ["pytest"]', "name is missing"),
        ('name = "a"\n[debian]\n[oci]\nlayout = "x"', "remove one of them"),
        ("name = ", "is not TOML"),
    ],
)
def test_a_bad_spec_is_refused_by_its_place(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    with pytest.raises(EtudeError, match=why):
        read_spec(path)


def test_files_were_written_over_a_year(tmp_path: Path) -> None:
    now, year = 1_700_000_000.0, 365 * 24 * 3600
    written: list[dict[str, float]] = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        (folder / "inner").mkdir(parents=True)
        for name in ("a", "b", "c", "inner/d"):
            (folder / name).write_text("x")
        spread_times(folder, now)
        found = {path.name: path.stat() for path in folder.rglob("*")}
        assert all(now - year <= each.st_mtime <= now for each in found.values())
        written.append({name: each.st_mtime for name, each in found.items()})
    assert written[0] == written[1], "the same ones at the same distance"
    assert len(set(written[0].values())) == 5


def test_scripts_name_the_python_of_the_image(tmp_path: Path) -> None:
    """Other occurrences of the path stay the same."""
    scripts = tmp_path / "bin"
    scripts.mkdir()
    (scripts / "pytest").write_text(f"#!{tmp_path}/bin/python\nimport pytest  # {tmp_path}\n")
    others = {"tool": b"#!/bin/sh\necho hi\n", "data": f"\x7f {tmp_path}".encode()}
    for name, content in others.items():
        (scripts / name).write_bytes(content)
    (scripts / "python").symlink_to("/usr/bin/python3")
    (scripts / "inner").mkdir()
    images._retarget(tmp_path)
    told = (scripts / "pytest").read_text()
    assert told == f"#!{images.VENV}/bin/python\nimport pytest  # {images.VENV}\n"
    assert {name: (scripts / name).read_bytes() for name in others} == others
