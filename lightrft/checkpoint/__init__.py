"""Write and read checkpoints and Hugging Face folders, whole or not at all."""
