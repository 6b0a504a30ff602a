"""Seeing token weights: the token dump, weights of existing responses, the report's page, the terminal."""
