"""``python -m grail_advantage.receipt RUN``: the receipt of a run, read from its token dump."""

import sys

from grail_advantage.receipt.report import main

if __name__ == "__main__":
    sys.exit(main())
