"""``python -m`` of this package: the receipts of a file; as a part of grail_advantage also of a run's token dump."""

import sys

if __package__.count("."):
    from ..view.receipt import main
else:
    from .report import main

if __name__ == "__main__":
    sys.exit(main())
