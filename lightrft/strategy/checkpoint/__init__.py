"""Write checkpoints and Hugging Face folders atomically, and read them."""
