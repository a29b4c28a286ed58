"""Build and try the packages as for an index: `make wheels`.

    python -m tests.wheels [--into dist] [--python 3.12] [--skip-tests]

It builds an sdist, and from that a wheel for each processor with a compiler: this one, and the
other one by a cross-compiler (on Debian: gcc-x86-64-linux-gnu, gcc-aarch64-linux-gnu). The
libraries in a wheel do not depend on Python, so one wheel serves all versions. They do not contain
OpenMP: they use the one that torch brings.

The wheel for this processor is installed with all its requirements into a fresh environment of each
Python that is found. There, outside the checkout, it must print its version, load its libraries,
finish a run of a few steps and chat with the trained model. So must the sdist, with the first of
these Pythons. The contents of a wheel for another processor are checked, but it is not run.

The newest matching torch is installed, which may be gigabytes for each Python; pip's variables
apply (PIP_CONSTRAINT, PIP_EXTRA_INDEX_URL).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
LIBRARIES = ("etude/engine/_native.abi3.so", "etude/weights/_delta.abi3.so")
DATA = ("etude/commands/demo.toml", "etude/py.typed")
MACHINES = {"x86_64": 62, "aarch64": 183}
"""Processors with their numbers in an ELF header."""
BY_TORCH = "libgomp.so.1"

LOADED = """
import etude, pathlib
from etude.engine import native
from etude.weights import fast
assert native.LIBRARY and fast.LIBRARY, "the compiled libraries are not loaded"
print(f"{pathlib.Path(etude.__file__).parent}: libraries loaded, for {native.ISA.name.lower()}")
"""
SHORT = ("stage.rl.steps=3", "tasks.heldout=4", "sandbox.isolation=process")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.wheels")
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only with this one")
    parser.add_argument("--skip-tests", action="store_true", help="build and check them only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="etude-wheels-") as scratch:
        sdist, wheels = build(args.into.absolute(), Path(scratch))
        run("twine", "check", "--strict", sdist, *wheels.values())
        if not args.skip_tests:
            try_all(sdist, wheels, args.python or PYTHONS, Path(scratch))
    print("built:", *sorted(path.name for path in (sdist, *wheels.values())), sep="\n  ")


def build(into: Path, scratch: Path) -> tuple[Path, dict[str, Path]]:
    """The sdist, and the wheels by processor."""
    shutil.rmtree(into, ignore_errors=True)
    run("build", "--sdist", "--outdir", into, ROOT)
    (sdist,) = into.glob("*.tar.gz")
    wheels = {}
    for machine in MACHINES:
        native = machine == platform.machine()
        compiler = shutil.which("gcc" if native else f"{machine}-linux-gnu-gcc")
        if compiler is None:
            say(f"no wheel for {machine}: there is no compiler for it (gcc-{machine}-linux-gnu)")
        else:
            wheels[machine] = build_wheel(sdist, machine, compiler, into, scratch / machine)
    return sdist, wheels


def build_wheel(sdist: Path, machine: str, compiler: str, into: Path, scratch: Path) -> Path:
    say(f"a wheel for {machine}, by {compiler}")
    with tarfile.open(sdist) as packed:
        packed.extractall(scratch, filter="data")
    (source,) = scratch.iterdir()
    cross = {
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }
    run("build", "--wheel", "--outdir", scratch, source, **cross)
    (plain,) = scratch.glob("*.whl")
    run("auditwheel", "repair", "--exclude", BY_TORCH, "--wheel-dir", into, plain)
    (wheel,) = into.glob(f"*_{machine}.whl")
    check_content(wheel, machine)
    return wheel


def check_content(wheel: Path, machine: str) -> None:
    """Check the files in a wheel. The compiled libraries, optional for setuptools, are required
    here."""
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        missing = [name for name in (*LIBRARIES, *DATA) if name not in names]
        assert not missing, f"{wheel.name} lacks {missing}"
        assert not [name for name in names if name.endswith((".c", ".h", ".pth"))]
        for name in LIBRARIES:
            (number,) = struct.unpack_from("<H", packed.read(name), 18)
            assert number == MACHINES[machine], f"{name} in {wheel.name} is for another processor"
    assert "-cp311-abi3-manylinux" in wheel.name, f"{wheel.name} is not for every Linux"


def try_all(sdist: Path, wheels: dict[str, Path], wanted: list[str], scratch: Path) -> None:
    pythons = {version: path for version in wanted if (path := find_python(version))}
    for version in wanted:
        if version not in pythons:
            say(f"Python {version} was not found: nothing is tried with it")
    assert pythons, "no Python to try the wheel with"
    for number, (version, python) in enumerate(pythons.items()):
        say(f"Python {version}: {python}")
        place = scratch / version
        subprocess.run([python, "-m", "venv", place / "venv"], check=True)
        shutil.copytree(ROOT / "examples", place / "examples")
        attempt(wheels[platform.machine()], place)
        if number == 0:
            attempt(sdist, place, "--no-deps", "--force-reinstall")
        shutil.rmtree(place)  # with torch it is large
    for machine, wheel in wheels.items():
        if machine != platform.machine():
            say(f"{wheel.name} was built and checked, and not run: this is {platform.machine()}")


def attempt(package: Path, place: Path, *options: str) -> None:
    """Install a package into the environment in `place`, and use it."""
    say(f"{package.name}")
    programs = place / "venv" / "bin"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def call(*argv: object, typed: str = "") -> None:
        command = [programs / str(argv[0]), *map(str, argv[1:])]
        subprocess.run(command, check=True, cwd=place, env=environment, input=typed, text=True)

    call("python", "-m", "pip", "install", "--quiet", *options, package)
    call("etude", "--version")
    call("etude", "--help")
    call("python", "-c", LOADED)
    shutil.rmtree(place / "run", ignore_errors=True)
    changes = [word for change in SHORT for word in ("--set", change)]
    call("etude", "run", "examples/custom_env.toml", "--dir", "run", *changes)
    call("etude", "audit", "run")
    call("etude", "chat", "run", "--max-tokens", "8", typed="sing 1\n")


def find_python(version: str) -> str | None:
    """Find a Python on the path or among pyenv's. A command of pyenv may exist without its
    version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python{version}")]
    for python in map(str, filter(None, found)):
        said = subprocess.run([python, "-V"], capture_output=True, text=True, check=False).stdout
        if said.startswith(f"Python {version}."):
            return python
    return None


def run(module: str, *argv: object, **changes: str) -> None:
    """Run a tool of the current environment; its output is shown only if it fails."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, argv)],
        env=os.environ | {"PATH": programs} | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{module} failed")


def say(text: str) -> None:
    print(f"-- {text}", flush=True)


if __name__ == "__main__":
    main()
