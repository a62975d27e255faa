"""RMS norm: reference.py in plain torch, the native kernel in C++ beside it."""
