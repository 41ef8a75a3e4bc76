"""Ops: one file each, a plain PyTorch reference for all of them, quick CPU versions where a profile asked. Ranks only."""
