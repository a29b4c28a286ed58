"""Benchmarks, one file each: `run()` returns named figures, the module's docstring explains them,
and `etude bench NAME` prints them. They measure the real system, with the processes and the code of
a run."""
