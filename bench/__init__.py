"""Does a method find anything? Its weights beside their own shuffled control, on tasks whose answer is known: docs/bench.md."""
