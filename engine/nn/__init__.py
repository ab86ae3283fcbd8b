"""The one decoder that runs a `ModelSpec`. Knows kernels; knows no model names and no cache policy."""
