"""The specification of every op in plain PyTorch: any dtype, float32 accumulation (float64 stays), never tuned."""
