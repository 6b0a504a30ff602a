"""Runs that are killed, and runs on nodes of one machine; their recorded pages.

python -m benchmarks.endurance soak --output-dir DIR      300 steps of the CPU example, killed at set steps; about an hour
python -m benchmarks.endurance kill --kinds engine raylet one kill each in a small run; without --kinds every kind
python -m benchmarks.endurance nodes --only equal2 cut2   on nodes against one, and a node that is lost; needs 12 GB
python -m benchmarks.endurance page                       docs/soak, docs/dev/kills.md, docs/dev/local_nodes.md from the records
python -m benchmarks.endurance page --soak DIR            with the records of a finished soak
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.endurance import kills, nodes, soak, soak_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    soaking = commands.add_parser("soak", help="the soak")
    soaking.add_argument("--output-dir", type=Path, required=True)
    soaking.add_argument("--steps", type=int, default=300)
    soaking.add_argument("--kills", type=int, default=len(soak.KILLED), help=f"the first of {', '.join(soak.KILLED)}")
    soaking.add_argument("--patience", type=float, default=180.0, help="seconds for a killed run to end by itself")
    killing = commands.add_parser("kill", help="the kill matrix")
    killing.add_argument("--kinds", nargs="+", choices=kills.KINDS, default=list(kills.KINDS), metavar="KIND")
    on_nodes = commands.add_parser("nodes", help="the checks on nodes")
    on_nodes.add_argument("--only", nargs="+", choices=nodes.PARTS, default=list(nodes.PARTS), metavar="PART")
    page = commands.add_parser("page", help="the pages from the records")
    page.add_argument("--soak", type=Path, help="with the records of a finished soak; without kills, its memory beside")
    arguments = parser.parse_args()
    if arguments.command == "soak":
        soak.Soak(arguments.output_dir.resolve(), arguments.steps, arguments.kills, arguments.patience).run()
    elif arguments.command == "kill":
        kills.run(arguments.kinds)
    elif arguments.command == "nodes":
        nodes.run(arguments.only)
    else:
        if arguments.soak:
            soak_page.collect(arguments.soak)
        soak_page.write()
        kills.write_page()
        nodes.write_page()


if __name__ == "__main__":
    main()
