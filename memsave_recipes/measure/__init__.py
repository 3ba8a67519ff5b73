"""COUNT: bytes, seconds and saved tensors, as they are."""
