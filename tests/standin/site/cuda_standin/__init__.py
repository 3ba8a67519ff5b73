"""CUDA devices whose memory is the host's, for a torch that was built without CUDA: ``../../README.md``."""
