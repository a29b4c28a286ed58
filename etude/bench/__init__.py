"""Benchmarks, one file each: `run()` returns named figures, its docstring says what they mean, and
`etude bench NAME` prints them. They measure the real thing, with the processes and the code of a
run."""
