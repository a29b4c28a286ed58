"""Triton kernels of a decode step on CUDA, each a pure function of tensors with one wrapper that
launches it."""
