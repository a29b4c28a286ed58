"""The model on a wire: an OpenAI-compatible API, the worker process around the engine, and the
gateway that routes requests to workers and records what was sampled, token by token."""
