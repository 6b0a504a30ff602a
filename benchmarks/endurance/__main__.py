"""Runs of which one process is killed, and runs on nodes of one machine; their recorded pages.

python -m benchmarks.endurance kill --kinds engine raylet one kill each in a small run; without --kinds every kind
python -m benchmarks.endurance nodes --only equal2 cut2   on nodes against one, and a node that is lost; needs 12 GB
python -m benchmarks.endurance page                       docs/dev/kills.md and docs/dev/local_nodes.md from the records
"""

from __future__ import annotations

import argparse

from benchmarks.endurance import kills, nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    killing = commands.add_parser("kill", help="the kill matrix")
    killing.add_argument("--kinds", nargs="+", choices=kills.KINDS, default=list(kills.KINDS), metavar="KIND")
    on_nodes = commands.add_parser("nodes", help="the checks on nodes")
    on_nodes.add_argument("--only", nargs="+", choices=nodes.PARTS, default=list(nodes.PARTS), metavar="PART")
    commands.add_parser("page", help="the pages from the records")
    arguments = parser.parse_args()
    if arguments.command == "kill":
        kills.run(arguments.kinds)
    elif arguments.command == "nodes":
        nodes.run(arguments.only)
    else:
        kills.write_page()
        nodes.write_page()


if __name__ == "__main__":
    main()
