"""OpenAI's dialect: chat completions with tools, completions of text or token ids, and models."""
