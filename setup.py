"""Optional C libraries; without a compiler the Python fallbacks run. All else is in
pyproject.toml.

They are loaded by ctypes and know nothing of Python, so one wheel serves every Python from 3.11 on:
it is named like one for the limited API, and so are the libraries in it.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "etude.weights._delta",
            ["etude/weights/delta.c"],
            extra_compile_args=["-O3"],
            optional=True,
            py_limited_api=True,
        ),
        Extension(
            "etude.engine._native",
            [f"etude/engine/{name}.c" for name in ("native", "native_avx2", "native_avx512")],
            depends=["etude/engine/native.h", "etude/engine/pass.h"],
            extra_compile_args=["-O3", "-fopenmp", "-Wno-psabi"],
            extra_link_args=["-fopenmp"],
            libraries=["m"],
            optional=True,
            py_limited_api=True,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
