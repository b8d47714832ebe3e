"""A server for clients of Tinker: they send examples and prompts, and all ranks compute."""
