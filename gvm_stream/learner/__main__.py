"""The learner of a run on one or several processes: `torchrun --nproc-per-node N -m gvm_stream.learner RUN.toml`."""

from __future__ import annotations

import argparse
import sys

from gvm_stream import cli


def main() -> int:
    parser = argparse.ArgumentParser(prog="gvm_stream.learner", description=__doc__, epilog=cli.OVERRIDES)
    parser.add_argument("file", help="configuration, TOML")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in run.dir")
    given, overrides = cli.split_overrides(sys.argv[1:])
    options = parser.parse_args(given)
    resume = ["--resume"] if options.resume else []
    return cli.main(["learner", "--config", options.file, *resume, *overrides])


sys.exit(main())
