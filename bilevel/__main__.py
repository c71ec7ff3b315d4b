"""The command line: ``python -m bilevel --help``."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import bilevel

DESCRIPTION = """\
Look at runs of bilevel.solve.

  python -m bilevel report run.pt.jsonl --watch 5   the page of a run that goes on, made again every five seconds
  python -m bilevel report runs/*                   several runs side by side
"""


def main(arguments: list[str] | None = None) -> None:
    """Run one command.

    Args:
        arguments: Those of the command line by default.
    """
    options = parser().parse_args(arguments)
    written: list[Path] = []

    def told(path: Path) -> None:
        if not written:
            print(f"see {path}" + ("; Ctrl-C ends the watch, not the run" if options.watch else ""), flush=True)
        written.append(path)

    try:
        bilevel.report.write(options.run, options.out, title=options.title, watch=options.watch, told=told)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(0)
    if options.watch:
        print("all runs have ended", flush=True)


def parser() -> argparse.ArgumentParser:
    """The options of all commands."""
    top = argparse.ArgumentParser(
        prog="python -m bilevel", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--version", action="version", version=bilevel.__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    this = commands.add_parser(
        "report",
        help="one self-contained HTML page of one run, or of several compared",
        description="Make one HTML page that needs no network. Logs are only read: the run may go on.",
    )
    this.add_argument(
        "run",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="event log (solve(checkpoint='run.pt') writes run.pt.jsonl), history.csv, or a folder that has some",
    )
    this.add_argument("--out", type=Path, metavar="FILE", help="the page (default: report.html beside the first run)")
    this.add_argument(
        "--watch",
        type=_seconds,
        metavar="SECONDS",
        help="make the page again every so many seconds until the runs have ended",
    )
    this.add_argument("--title", default="", help="above the page (default: the name of the run)")
    return top


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return value


if __name__ == "__main__":
    main()
