"""Tasks with a verdict: small Python modules with a generated bug, their tests, and sessions that
repair them."""
