"""Token weights of existing responses: any registered method, any Hugging Face causal language model, no training.

``python -m grail_advantage.analyze --help``; docs/analyze.md has the formats. Needs torch and transformers alone.
"""
