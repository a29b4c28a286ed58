"""The coding harness: the tools of a product, in training as well, chosen by `[harness.code]`."""
