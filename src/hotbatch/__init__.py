"""hotbatch: an inference server that fills every step with the work worth most."""
