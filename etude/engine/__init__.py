"""Inference over `model/`: continuous batching, a key/value cache, exact log-probs, and weights
that change in flight. A synchronous library; `serve/` adds the server."""
