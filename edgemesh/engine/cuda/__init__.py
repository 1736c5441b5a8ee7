"""The engine on CUDA: the same plans and weights, fused kernels, attention over pages, decode steps as captured graphs."""
