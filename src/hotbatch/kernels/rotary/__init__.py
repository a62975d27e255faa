"""Rotary embedding and KV cache writes: torch reference, and the native kernel beside it."""
