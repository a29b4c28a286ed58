"""The only door to storage: objects under keys, append-only logs of records over them, and the
layout of one run.

Everything here is synchronous and thread-safe; a process that runs an event loop calls it by
`asyncio.to_thread`.
"""
