"""The receipt in trainers, a file each; a loop of one's own needs :func:`~grail_advantage.receipt.watch` alone."""
