"""Entry points of the commands ``glass`` and ``tilec``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from glass_jax import config, errors
from glass_jax.cli import doctor, lower, plan

USAGE_ERROR = 2  # exit code of a mistake on the command line, argparse's own; 1 says that --verify found something


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``glass`` with ``argv`` (the process's own arguments by default); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="glass", description="Ascend kernels from JAX: look at them, check them, write them."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor.add_arguments(commands.add_parser("doctor", help=doctor.SUMMARY, description=doctor.SUMMARY))
    lower.add_arguments(commands.add_parser("lower", help=lower.SUMMARY, **lower.help_text("glass lower")))
    plan.add_arguments(commands.add_parser("plan", help=plan.SUMMARY, **plan.help_text()))
    return _run(parser, argv)


def tilec(argv: Sequence[str] | None = None) -> int:
    """Runs ``tilec``, which is ``glass lower``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tilec", **lower.help_text("tilec"))
    lower.add_arguments(parser)
    return _run(parser, argv)


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; those that argparse leaves over, because options stand before them, are KEY=VALUE all the same."""
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "arguments") or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.arguments += rest
    return args


def _run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """The command that ``argv`` names; a user's mistake becomes one message on stderr."""
    args = _parse(parser, argv)
    debug = False
    try:
        debug = config.current().debug
        code = args.command(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough, as in `glass lower ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at exit
        return 0
    except (errors.GlassError, ValueError, OSError) as error:
        if debug:
            raise
        print(f"{parser.prog}: {error} (GLASS_DEBUG=1 shows where it comes from)", file=sys.stderr)
        return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
