"""lightrft: reinforcement fine-tuning of language and vision-language models, one process per device."""

__version__ = "0.1.0"
