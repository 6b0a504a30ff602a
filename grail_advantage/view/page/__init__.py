"""See what a method makes of tokens: a page, a terminal, a notebook, from token dumps.

The dumps are :mod:`grail_advantage.dump`'s.
"""
