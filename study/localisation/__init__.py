"""Whether token weights find the wrong step of a solution: docs/localisation/README.md."""
