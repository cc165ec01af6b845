"""A real Prometheus scrapes a real run; every query of the dashboards and alerts is put to it and must return series.

`python ops/check_prometheus.py`: about a minute; exit status 1 and the list of what failed otherwise. Needs the
programs `prometheus` and `promtool`.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import msgspec
import trio

from gvm_stream.dashboards.queries import Query, alerts, of_dashboards, selectors

ROOT = Path(__file__).resolve().parents[1]
PROMETHEUS = ROOT / "ops" / "prometheus"
PROCESSES = 3
"""Of the run: allocator, learner, one producer."""
RATE_INTERVAL = "15s"
START_S = 150.0
"""Time the run has until it trains and Prometheus sees it."""
HISTORY_S = 10.0
"""How long it is then watched: queries of rates need some samples."""
RUN = ("run", str(ROOT / "examples" / "arithmetic.toml"), "--plain", "--run.steps=100000", "--eval.prompts=20")


async def main() -> int:
    first_port = free_ports(PROCESSES + 2)
    stream_port, web_port = first_port + PROCESSES, first_port + PROCESSES + 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        targets = [f"127.0.0.1:{first_port + i}" for i in range(PROCESSES)]
        write_config(folder, targets)
        run = [
            *(sys.executable, "-m", "gvm_stream", *RUN),
            f"--run.dir={folder / 'run'}",
            f"--metrics.port={first_port}",
            f"--stream.address=tcp://127.0.0.1:{stream_port}",
        ]
        prometheus = [
            *("prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"),
            *(f"--web.listen-address=127.0.0.1:{web_port}", "--log.level=warn"),
        ]
        async with trio.open_nursery() as nursery:
            running: trio.Process = await nursery.start(partial(trio.run_process, run, check=False))
            await nursery.start(trio.run_process, prometheus)
            server = Prometheus(f"http://127.0.0.1:{web_port}")
            async with trio.open_nursery() as watch:
                watch.start_soon(fail_when_it_ends, running)
                with trio.fail_after(START_S):
                    await server.until(f"sum(up) == {PROCESSES}")
                    await server.until('gvm_learner_batches_total{result="trained"} >= 3')
                await trio.sleep(HISTORY_S)
                watch.cancel_scope.cancel()
            failures = await check(server)
            for target in targets:
                failures += await lint(target)
            running.send_signal(signal.SIGINT)
            await running.wait()
            nursery.cancel_scope.cancel()
    sys.stderr.writelines(f"{failure}\n" for failure in failures)
    return 1 if failures else 0


async def fail_when_it_ends(run: trio.Process) -> None:
    raise SystemExit(f"the run ended early, with status {await run.wait()}")


class Prometheus:
    def __init__(self, address: str) -> None:
        self._address = address

    async def query(self, expr: str, at: float | None = None) -> list[dict[str, Any]]:
        """The series an expression returns now, or at a time."""
        when = {} if at is None else {"time": at}
        return list((await self.get("query", query=expr, **when))["result"])

    async def until(self, expr: str) -> None:
        """Wait until an expression returns something; Prometheus cannot tell us itself."""
        while True:
            try:
                if await self.query(expr):
                    return
            except OSError:  # it does not listen yet
                pass
            await trio.sleep(0.5)

    async def get(self, path: str, **parameters: object) -> dict[str, Any]:
        text = await read(f"{self._address}/api/v1/{path}?{urlencode(parameters)}")
        return dict(json.loads(text)["data"])


async def check(server: Prometheus) -> list[str]:
    """What does not return series, and what is wrong with the rules."""
    now = time.time()
    rules = alerts(PROMETHEUS / "alerts.yml")
    panels = of_dashboards(ROOT / "ops" / "grafana")
    asked = [Query(q.source, q.expr.replace("$__rate_interval", RATE_INTERVAL)) for q in panels]
    # An alert on a healthy run returns nothing, by intent; each metric in it must be there.
    asked += [Query(f"alert {rule.alert}", s.text) for rule in rules for s in selectors(rule.expr)]
    failures, unknown = [], 0
    for source, expr in asked:
        try:
            series = await server.query(expr, now)
        except OSError as error:
            failures.append(f"{source}: {error} for {expr}")
            continue
        if not series:
            failures.append(f"{source}: no series for {expr}")
        unknown += all(result["value"][1] == "NaN" for result in series)
    for group in (await server.get("rules"))["groups"]:
        for rule in group["rules"]:
            if rule["health"] != "ok":
                failures.append(f"alert {rule['name']}: {rule['health']} {rule.get('lastError', '')}")
            if rule["state"] == "firing":
                failures.append(f"alert {rule['name']} fires on a healthy run")
    series = await server.query('count by (instance) ({__name__=~"gvm_.+"})', now)
    sizes = ", ".join(result["value"][1] for result in series)
    metrics = len(asked) - len(panels)
    sys.stdout.write(
        f"{len(panels)} queries, {len(rules)} alerts with {metrics} metrics, {unknown} not a number yet; "
        f"series of the processes: {sizes}\n"
    )
    return failures


async def lint(target: str) -> list[str]:
    """What promtool finds wrong with the metrics of a process."""
    text = await read(f"http://{target}/metrics")
    done = await trio.run_process(
        ["promtool", "check", "metrics"], stdin=text.encode(), capture_stdout=True, capture_stderr=True, check=False
    )
    return [] if done.returncode == 0 else [f"{target}: {done.stdout.decode()}{done.stderr.decode()}"]


async def read(url: str) -> str:
    def get() -> str:
        with urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())

    return await trio.to_thread.run_sync(get)


def write_config(folder: Path, targets: list[str]) -> None:
    """The configuration that is shipped, with these targets and short intervals."""
    config = msgspec.yaml.decode((PROMETHEUS / "prometheus.yml").read_bytes())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "alerts.yml")]
    (job,) = config["scrape_configs"]
    config["scrape_configs"] = [{"job_name": job["job_name"], "static_configs": [{"targets": targets}]}]
    (folder / "prometheus.yml").write_bytes(msgspec.yaml.encode(config))


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    for first in range(21_000, 32_000, 11):
        try:
            servers = [socket.create_server(("127.0.0.1", first + i)) for i in range(count)]
        except OSError:
            continue
        for server in servers:
            server.close()
        return first
    raise SystemExit("no free ports")


if __name__ == "__main__":
    sys.exit(trio.run(main))
