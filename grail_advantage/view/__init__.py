"""Seeing token weights: the token dump, weights of existing responses, the report's page, the terminal."""

ROLLOUTS = 2000  # most in a page
MEGABYTES = 35.0  # of a page
