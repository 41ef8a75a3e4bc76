"""The specification of every op in plain PyTorch: any dtype, wide accumulation, never tuned."""
