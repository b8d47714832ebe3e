"""Make the log-probs of the hf engine and of the trainer equal, bit by bit."""
