from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from gvm_stream.config import HttpSection, VerifierSection
from gvm_stream.errors import ConfigError
from gvm_stream.verify import external
from gvm_stream.verify.external import load_function
from gvm_stream.verify.rules import judge
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable, VerifyItem

ITEM = VerifyItem(answer="4", response="f\N{LATIN SMALL LETTER O WITH DIAERESIS}ur words are here", prompt="train-1")

# --- a function of the user ------------------------------------------------------------------------------------------


def python(function: str) -> Verdict:
    return judge(VerifierSection(kind="python", function=f"{__name__}:{function}"), ITEM)


def returns_true(answer: str, response: str) -> bool:
    return (answer, response) == (ITEM.answer, ITEM.response)


def returns_numpy(answer: str, response: str) -> object:
    import numpy as np

    return np.float32(0.25)


def returns_nan(answer: str, response: str) -> float:
    return float("nan")


def returns_text(answer: str, response: str) -> str:
    return "1.0"


def returns_nothing(answer: str, response: str) -> None:
    return None


def fails(answer: str, response: str) -> float:
    raise KeyError("no such row")


@pytest.mark.parametrize(("function", "reward"), [("returns_true", 1.0), ("returns_numpy", 0.25)])
def test_the_reward_is_what_the_function_returns(function: str, reward: float) -> None:
    verdict = python(function)
    assert isinstance(verdict, VerdictScored)
    assert verdict.reward == reward


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("returns_nan", "returned nan, expected a finite number"),
        ("returns_text", "returned '1.0', expected a finite number"),
        ("returns_nothing", "returned None, expected a finite number"),
        ("fails", "verifier python failed: KeyError: 'no such row'"),
        ("is_not_there", "has no attribute 'is_not_there'"),
    ],
)
def test_what_is_no_number_is_unscorable_with_the_reason(function: str, reason: str) -> None:
    verdict = python(function)
    assert isinstance(verdict, VerdictUnscorable)
    assert reason in verdict.reason


def test_the_shipped_example_is_a_verifier() -> None:
    settings = VerifierSection(kind="python", function="examples.custom_verifier:word_count")
    verdicts = [judge(settings, VerifyItem(answer="4", response=text)) for text in ("a b c d", "a b", "a " * 9)]
    assert [verdict.reward for verdict in verdicts if isinstance(verdict, VerdictScored)] == [1, 0.5, 0]


def test_a_function_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_here.py").write_text("def half(answer, response):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert load_function("my_rewards_here:half")("", "") == 0.5


@pytest.mark.parametrize(
    ("path", "message"),
    [("no_such_module_here:f", "cannot be imported: ModuleNotFoundError"), ("math:pi", "of type float")],
)
def test_a_function_that_is_none_is_named(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^verifier.function = '{path}' .*{message}"):
        load_function(path)


# --- a reward service ------------------------------------------------------------------------------------------------

Reply = tuple[int, bytes]
Serve = Callable[[Sequence[Reply]], tuple[str, list[bytes]]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a server that gives these replies one after the other, then the last one again; returns its address and
    the bodies it got. Status 0: it closes the connection without a reply."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(external, "FIRST_PAUSE_S", 0.001)
    servers: list[ThreadingHTTPServer] = []

    def start(replies: Sequence[Reply]) -> tuple[str, list[bytes]]:
        bodies: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                status, body = replies[min(len(bodies), len(replies)) - 1]
                if status:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing on stderr."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/score", bodies

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(url: str, *, retries: int = 3, timeout_s: float = 10.0) -> Verdict:
    return judge(VerifierSection(kind="http", http=HttpSection(url=url, retries=retries), timeout_s=timeout_s), ITEM)


def test_the_service_gets_the_item_and_its_reply_is_the_reward(serve: Serve) -> None:
    url, bodies = serve([(200, b'{"reward": 0.75, "note": "extra members do no harm"}')])
    assert ask(url) == VerdictScored(0.75, rule=f"{url} replied 0.75")
    assert msgspec.json.decode(bodies[0]) == {"prompt": "train-1", "response": ITEM.response, "answer": "4"}


def test_errors_of_the_server_and_broken_connections_are_tried_again(serve: Serve) -> None:
    url, bodies = serve([(503, b""), (0, b""), (429, b""), (200, b'{"reward": 1}')])
    verdict = ask(url)
    assert isinstance(verdict, VerdictScored)
    assert (verdict.reward, len(bodies)) == (1, 4)
    assert bodies == bodies[:1] * 4


def test_a_server_that_stays_broken_is_unscorable(serve: Serve) -> None:
    url, bodies = serve([(500, b'{"reward": 0}')])
    assert ask(url, retries=2) == VerdictUnscorable(f"{url}: status 500 in 3 attempts", "external")
    assert len(bodies) == 3


def test_nobody_there_is_unscorable(serve: Serve) -> None:
    verdict = ask("http://127.0.0.1:9/", retries=1)
    assert isinstance(verdict, VerdictUnscorable)
    assert "refused" in verdict.reason
    assert verdict.reason.endswith("in 2 attempts")


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_unscorable_at_once(serve: Serve, status: int) -> None:
    url, bodies = serve([(status, b'{"reward": 0}')])
    assert ask(url) == VerdictUnscorable(f"{url}: status {status}", "external")
    assert len(bodies) == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"0", b"{}", b'{"reward": null}', b'{"reward": "1"}', b'{"reward": NaN}', b'{"reward": 1e999}', b"\xff"],
)
def test_a_malformed_reply_is_unscorable_and_never_wrong(serve: Serve, body: bytes) -> None:
    url, bodies = serve([(200, body)])
    verdict = ask(url)
    assert isinstance(verdict, VerdictUnscorable)
    assert verdict.reason.startswith(url)
    assert len(bodies) == 1


def test_attempts_end_with_the_time_of_the_item(serve: Serve) -> None:
    url, _ = serve([(503, b"")])
    verdict = ask(url, retries=10**6, timeout_s=0.2)
    assert isinstance(verdict, VerdictUnscorable)
    assert verdict.reason.startswith(f"{url}: no time for another attempt after ")


def test_pauses_double_up_to_a_limit_with_jitter() -> None:
    pauses = [external._pause_s(attempt) for attempt in (1, 2, 5, 50)]
    for pause, mean in zip(pauses, (0.1, 0.2, 1.6, 5.0), strict=True):
        assert 0.5 * mean <= pause <= 1.5 * mean
    assert len({external._pause_s(3) for _ in range(5)}) == 5
