"""What this project costs. Each program is one command, listed in ``benchmarks/README.md``; nothing imports these modules."""
