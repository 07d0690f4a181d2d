"""Plans on tensors: memory, batches, kernels, sampling. The only package besides ``models`` that imports torch."""
