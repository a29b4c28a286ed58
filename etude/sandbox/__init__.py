"""Sandboxes, in which agents act and are graded. Each opens in milliseconds, has its own working
copy and no network, and ends with the process that opened it. Entry point:
`pool.open_sandbox_pool`."""
