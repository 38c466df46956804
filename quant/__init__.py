"""Packed tensor formats and their kernels. Importing this package needs neither torch nor numba."""
