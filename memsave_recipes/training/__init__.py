"""Flags, launch, exact global batches, optimizers and the guard against losses that are not finite."""

import logging

# transformers imports peft, peft bitsandbytes, and that one warns, on some CPUs, of a kernel that only 4-bit layers use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
