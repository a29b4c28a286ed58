"""Optional C extensions; without a compiler the Python fallbacks run. All else is in
pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "etude.weights._delta",
            ["etude/weights/delta.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        Extension(
            "etude.engine._native",
            [f"etude/engine/{name}.c" for name in ("native", "native_avx2", "native_avx512")],
            depends=["etude/engine/native.h", "etude/engine/pass.h"],
            extra_compile_args=["-O3", "-fopenmp", "-Wno-psabi"],
            extra_link_args=["-fopenmp"],
            optional=True,
        ),
    ]
)
