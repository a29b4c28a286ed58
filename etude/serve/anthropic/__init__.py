"""Anthropic's dialect: messages with tools and thinking, and token counts."""
