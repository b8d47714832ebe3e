"""Hold the program around a step: commands, loops, what builds them, and what a run leaves behind."""
