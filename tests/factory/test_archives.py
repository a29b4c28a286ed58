"""Sources other than folders: archives, and packages of an index."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from etude.core.errors import EtudeError
from etude.factory import sources
from etude.factory.sources import fetch, name_of

FILES = {
    "shop-1.2/shop/a.py": b"a",
    "shop-1.2/b.txt": b"b",
    "shop-1.2/build/a.py": b"copy",
    "shop-1.2/shop/a.pyc": b"cache",
    "shop-1.2/../../etc": b"out",
    "shop-1.2//root": b"out",
}
KEPT = {"shop/a.py": b"a", "b.txt": b"b"}


def tarred(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("shop-1.2/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return gzip.compress(packed.getvalue(), mtime=0)


def zipped(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.mkdir("shop-1.2")
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


@pytest.mark.parametrize(
    ("name", "packed"),
    [("shop-1.2.tar.gz", tarred(FILES)), ("shop-1.2.tgz", tarred(FILES)),
     ("shop-1.2.zip", zipped(FILES))],
)  # fmt: skip
def test_an_archive_is_its_files_below_the_folder_of_its_name(
    tmp_path: Path, name: str, packed: bytes
) -> None:
    (tmp_path / name).write_bytes(packed)
    found = fetch(str(tmp_path / name), tmp_path / "clones")
    assert (found.name, found.origin, found.git) == ("shop", name, None)
    assert found.files == KEPT
    assert list(found.files) == sorted(KEPT)


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_what_is_too_large_is_left_out_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: object
) -> None:
    assert callable(pack)
    path = tmp_path / ("a.zip" if pack is zipped else "a.tar.gz")
    monkeypatch.setattr(sources, "_MAX_BYTES", 8)
    path.write_bytes(pack({"a/exact": b"x" * 8, "a/larger": b"x" * 9}))
    assert fetch(str(path), tmp_path).files.keys() == {"exact"}
    path.write_bytes(pack({"a/one": b"x" * 8, "a/two": b"x"}))
    with pytest.raises(EtudeError, match="MiB of files are too large"):
        fetch(str(path), tmp_path)


def test_a_folder_is_read_without_its_links(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    for name in ("a.py", "c.so", "b.orig"):
        (tmp_path / "shop" / name).write_text("a")
    (tmp_path / "shop" / "link.py").symlink_to("a.py")
    found = fetch(str(tmp_path / "shop"), tmp_path / "clones")
    assert found.files == {"a.py": b"a"}
    assert (found.name, found.origin) == ("shop", "shop")


def served(monkeypatch: pytest.MonkeyPatch, *names: str, digest: str = "") -> list[str]:
    """Serve these files from an index; each file contains its name. Return the list of requests."""
    asked: list[str] = []

    def download(url: str) -> bytes:
        asked.append(url)
        if url.endswith("/"):
            links = [f'<a href="../../files/{name}{digest}">x</a>' for name in names]
            return "\n".join(links).encode()
        return tarred({"top/name.py": url.rpartition("/")[2].encode()})

    monkeypatch.setattr(sources, "_download", download)
    monkeypatch.setenv("PIP_INDEX_URL", "https://index/simple/")
    return asked


@pytest.mark.parametrize(
    ("source", "filename", "version"),
    [
        ("My_Shop", "my_shop-1.10.tar.gz", "1.10"),
        ("my.shop==1.9", "my-shop-1.9.tar.gz", "1.9"),
        ("my-shop==2.0rc1", "my.shop-2.0rc1.tar.gz", "2.0rc1"),
    ],
)
def test_the_newest_version_of_a_package_or_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, filename: str, version: str
) -> None:
    names = ["my-shop-1.9.tar.gz", "my_shop-1.10.tar.gz", "my.shop-2.0rc1.tar.gz"]
    asked = served(monkeypatch, *names, "my_shop-3.0-py3-none-any.whl")
    found = fetch(source, tmp_path)
    assert asked == ["https://index/simple/my-shop/", f"https://index/files/{filename}"]
    assert found.files == {"name.py": filename.encode()}
    assert (found.name, found.origin) == ("my-shop", f"my-shop=={version}")


def test_a_release_after_the_release_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(monkeypatch, "shop-1.0.post2.tar.gz", "shop-1.0.tar.gz", "shop-1.0.dev9.tar.gz")
    assert fetch("shop", tmp_path).origin == "shop==1.0.post2"


def test_what_an_index_does_not_have_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(monkeypatch, "shop-1.0-py3-none-any.whl", "shop-1.0rc1.tar.gz")
    for wanted in ("shop", "shop==2.0"):
        with pytest.raises(EtudeError, match="no source distribution"):
            fetch(wanted, tmp_path)


def test_what_was_fetched_is_what_the_index_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tarred({"top/name.py": b"shop-1.0.tar.gz"})
    good = hashlib.sha256(packed).hexdigest()
    asked = served(monkeypatch, "shop-1.0.tar.gz", digest=f"#sha256={good}")
    assert fetch("shop", tmp_path).origin == "shop==1.0"
    assert asked[-1].endswith("shop-1.0.tar.gz"), "without the digest"
    served(monkeypatch, "shop-1.0.tar.gz", digest=f"#sha256={'0' * 64}")
    with pytest.raises(EtudeError, match="the digest of the download differs"):
        fetch("shop", tmp_path)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("git@host:people/Shop.git/", "shop"),
        ("shop==1.2", "shop"),
        ("a/Shop_Cart-0.1b2.tar.bz2", "shop-cart"),
        ("https://host/people/v-2x", "v"),
        ("https://host/people/___", "repository"),
    ],
)
def test_names_are_plain(source: str, name: str) -> None:
    assert name_of(source) == name
