"""Answers in responses: their formats, their token spans, tokenizers, and the check that a run has any."""
