"""What the blocks of a model cost on a device that need not be here: fake tensors and a roofline."""
