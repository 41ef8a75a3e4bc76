"""Kernels measured on a GPU, beside other libraries and a copy: `python -m pdx.lab.kernels`."""
