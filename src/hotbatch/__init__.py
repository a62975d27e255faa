"""hotbatch: an inference server that fills every step with the work worth most."""

__version__ = "0.1.0"
