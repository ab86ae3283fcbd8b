"""`ops.Ops` on a CUDA device, in Triton. Not yet run on a GPU: proven in Triton's interpreter, compiled ahead of time."""
