"""Turn hidden states into log-probs: kernels, chunks, and the distribution that is sampled."""
