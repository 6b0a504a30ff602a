"""The one door to a model for every signal, and plain Hugging Face models as its first implementation."""
