"""Ops: one file each; a reference for all, quick CPU versions where a profile asked. Ranks only."""
