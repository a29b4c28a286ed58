"""The coding harness: the tools of a product, configured by `[harness.code]`, in training too."""
