"""Real processes killed and stopped at random while a run goes on, and what became of every rollout (tests/chaos.py).

    python -m benchmarks.chaos --json [--rollouts 10000] [--every 300] [--seed 0]

`lost`: rollouts that the run was to train on and that the surviving model has not seen; `duplicated`: those that it has
seen more than once. Both must be 0.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import trio

from benchmarks.report import finish, machine, parser
from tests.chaos import torment, write_config


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rollouts", type=int, default=10_000)
    arguments.add_argument("--every", type=int, default=300, help="rollouts between faults")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--folder", type=Path, help="where logs and state stay; default: nowhere")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        config = write_config(folder, rollouts=options.rollouts)
        outcome = trio.run(lambda: torment(config, folder, every=options.every, seed=options.seed))
    finish({"benchmark": "chaos", "machine": machine(), **msgspec.to_builtins(outcome)}, as_json=options.json)


if __name__ == "__main__":
    main()
