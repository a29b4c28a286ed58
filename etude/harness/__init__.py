"""The built-in coding agent: a few tools, and a loop that reaches the model only through an
OpenAI-compatible URL."""
