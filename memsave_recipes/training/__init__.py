"""Flags, launch, exact global batches, optimizers and the guard against losses that are not finite."""

import logging

# transformers imports peft, which imports bitsandbytes, which warns on some CPUs of a kernel for 4-bit layers alone.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
