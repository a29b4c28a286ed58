"""Anthropic's dialect: messages with tools and thinking, and the count of their tokens."""
