"""Sandboxes, in which agents act and are graded: made in milliseconds, with one working copy each,
without network, gone with the process that asked for them. Entry point:
`pool.open_sandbox_pool`."""
