"""OpenAI's dialect: chat completions with tools, completions with text or token ids, models."""
