"""Rotary embedding and KV cache writes: reference.py in plain torch, the native kernel beside it."""
