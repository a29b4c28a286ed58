"""The fast half of the weight codec, which a machine without a compiler does without. All else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension("etude.weights._delta", ["etude/weights/delta.c"], extra_compile_args=["-O3"], optional=True),
    ]
)
