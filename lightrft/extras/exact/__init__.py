"""Make the log-probs of the trainer and of the hf engine, or vLLM on a CPU, equal, bit by bit."""
