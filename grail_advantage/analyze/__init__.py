"""``python -m grail_advantage.analyze``: token weights of existing responses."""
