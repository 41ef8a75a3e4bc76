"""Safetensors files into a model's parameters; runs once, when a rank loads."""
