"""Tasks with a verdict: small Python modules with a bug put in by program, their tests, and
sessions that mend them."""
