"""Access to storage: objects under keys, append-only logs of records over them, and the layout of
one run. No other package accesses storage.

Everything here is synchronous and thread-safe; a process that runs an event loop calls it through
`asyncio.to_thread`.
"""
