"""``glass plan``: what a collective takes on a machine."""

from __future__ import annotations

import argparse
from typing import Any

from glass_jax.sharding import algorithms, report, topology
from glass_jax.sharding.planner import plan

SUMMARY = "Predict what a collective takes on a machine, and which algorithm is best there."

_DESCRIPTION = """\
Follows every algorithm's schedule on a described machine, link by link, and prints
what each takes, where its time goes, and which is best. Needs no devices.

Machines: {machines};
or a JSON file that describes another in the form of glass_jax/sharding/topologies.json."""

_EXAMPLES = """\
examples:
  glass plan --collective all_reduce --size 64MiB --ranks 1024 --topology a3
  glass plan --collective all_to_all --size 64KiB 1MiB 16MiB --ranks 64 --topology 910b
  glass plan --collective all_reduce --size 1GiB --ranks 16 --topology 910b \\
      --algorithm hierarchical --trace ring.json --picture ring.png

exit codes: 0 done, 2 the command cannot be carried out"""


def help_text() -> dict[str, Any]:
    """Keyword arguments of the parser: description, examples, and lines kept as they are."""
    machines = ", ".join(machine.name for machine in topology.topologies())
    return {
        "description": _DESCRIPTION.format(machines=machines),
        "epilog": _EXAMPLES,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Makes ``parser`` the parser of ``glass plan``."""
    parser.set_defaults(command=_run)
    parser.add_argument(
        "--collective", required=True, metavar="NAME", help=f"one of {', '.join(algorithms.ALGORITHMS)}"
    )
    parser.add_argument(
        "--size",
        required=True,
        nargs="+",
        metavar="SIZE",
        help="of the whole array, for example 64KiB or 1GB; several are compared",
    )
    parser.add_argument("--topology", required=True, metavar="NAME", help="a machine, see above")
    parser.add_argument("--ranks", type=int, metavar="P", help="default: all of the machine, at most 16384")
    parser.add_argument("--algorithm", default="auto", metavar="NAME", help="look at one algorithm only")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline here, for https://ui.perfetto.dev")
    parser.add_argument("--picture", metavar="FILE", help="draw the schedule here (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(args: argparse.Namespace) -> int:
    sizes = [report.parse_size(text) for text in args.size]
    found = plan(args.collective, sizes, args.topology, ranks=args.ranks, algorithm=args.algorithm)
    print(found.to_json() if args.json else found)
    if args.trace:
        found.save_trace(args.trace)
    if args.picture:
        found.save_picture(args.picture)
    return 0
