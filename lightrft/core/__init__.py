"""One step of training on generated samples; it imports torch, numpy and itself."""
