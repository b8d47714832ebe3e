"""Hold the program around a step: commands, loops, what builds them, and what runs leave."""
