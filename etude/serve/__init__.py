"""The model served over HTTP: an OpenAI-compatible API, the worker process around the engine, and
the gateway, which routes requests to workers and records what was sampled, token by token."""
