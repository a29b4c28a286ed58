"""The configuration of the model: a shape, or a directory."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from etude.core.schema import Config, Count, Place


class ModelConfig(Config):
    """The shape of a fresh model, or the directory of one to start from."""

    hidden_size: Count = 128
    """Width of the residual stream."""
    num_layers: Count = 4
    """Transformer layers."""
    num_heads: Count = 4
    """Query heads; they divide hidden_size."""
    num_kv_heads: Count = 2
    """Key and value heads; they divide num_heads."""
    intermediate_size: Count = 384
    """Width of the feed-forward layer."""
    max_context: Annotated[int, Field(ge=2)] = 512
    """Tokens of the longest session, including the prompt."""
    vocab_size: Count = 512
    """Tokens of the vocabulary, which is learnt from the built-in corpus."""
    path: Annotated[str | None, Place.PATH] = None
    """A Hugging Face directory to start from. It determines the shape; of the other keys only
    max_context still applies."""

    @model_validator(mode="after")
    def _shape(self) -> ModelConfig:
        if self.path is not None:
            shape = set(ModelConfig.model_fields) - {"path", "max_context"}
            if told := sorted(
                key for key in shape if getattr(self, key) != ModelConfig.model_fields[key].default
            ):
                raise ValueError(f"path already decides {', '.join(told)}: remove one or the other")
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be num_heads {self.num_heads} times an even "
                f"number"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        return self
