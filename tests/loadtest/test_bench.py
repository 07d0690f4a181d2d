"""The command, against Tenfold's own server around a runner without a model."""

from __future__ import annotations

import builtins
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.serving import Live, serving
from tenfold.server import ServerSettings

Command = Callable[..., tuple[Any, str, str]]
KEY = "hush-hush"
LETTERS = ("--token-ids", "97:122")
"""Token ids that the tests' tokenizer has, and that stand for letters."""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(ServerSettings(api_keys=(KEY,)), seconds=0.001) as server:
        yield server


@pytest.fixture
def bench(live: Live, command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("TENFOLD_API_KEY", KEY)
    return lambda *arguments: command("bench", "serve", live.url, *LETTERS, *arguments)


def value(text: str, name: str) -> str:
    """The first number behind a name in the table."""
    found = re.search(rf"^ *{re.escape(name)} +(\S+)", text, re.MULTILINE)
    assert found, text
    return found.group(1)


def test_a_run(bench: Command, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    workload = ("-n", "12", "--prompt-tokens", "5:40", "--output-tokens", "4:9", "--shared-prefix", "64")
    goals = ("--goodput", "e2e:60000", "--goodput", "ttft:0.001")
    status, out, err = bench(*workload, "--warmup", "2", *goals, "--json", str(file))
    assert (status, err) == (0, "")
    assert re.match(r"12 requests to scripted at http://127\.0\.0\.1:\d+/v1/completions in ", out)
    assert "prompts of 5 to 40 tokens after 64 that all share, outputs of 4 to 9, seed 0; all at once" in out
    assert (value(out, "completed"), value(out, "failed"), value(out, "goodput")) == ("12", "0", "0")
    assert "of other length" not in out and "without usage" not in out
    data = json.loads(file.read_text())
    assert data["schema"] == "tenfold-bench-serve/1" and not data["interrupted"]
    requests, summary = data["requests"], data["summary"]
    assert [request["index"] for request in requests] == list(range(12))
    assert all(request["output_tokens"] == request["asked_output_tokens"] for request in requests)
    assert all(request["prompt_tokens"] == request["asked_prompt_tokens"] for request in requests)
    assert all(request["due"] <= request["sent"] <= request["first"] <= request["end"] for request in requests)
    assert all(len(request["gaps"]) < request["output_tokens"] for request in requests)
    assert summary["output_tokens"] == sum(request["output_tokens"] for request in requests)
    assert summary["cached_tokens"] == sum(request["cached_tokens"] for request in requests)
    assert summary["cached_tokens"] >= 64 * 6, "the prefix is shared"
    assert summary["per_second"]["output_tokens"] == summary["output_tokens"] / summary["seconds"]
    assert data["settings"]["model"] == "scripted" and data["settings"]["shared_prefix"] == 64
    assert KEY not in out + file.read_text()


def test_other_ways_to_ask(bench: Command, tmp_path: Path) -> None:
    short = ("--prompt-tokens", "5", "--output-tokens", "4", "-n", "6")
    status, out, _ = bench(*short, "--endpoint", "chat", "--concurrency", "2")
    assert status == 0 and value(out, "completed") == "6"
    assert "each as soon as another ends, at most 2 at once" in out
    status, out, _ = bench(*short, "--prompts", "text", "--rate", "200")
    assert status == 0 and value(out, "completed") == "6"
    assert "arriving at random, 200 a second" in out


def test_a_trace(bench: Command, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt_len,output_len\n10,20,3\n12,20,2\n13,9000,2\n")
    status, out, _ = bench("--workload", str(trace), "--trace-speed", "40", "--max-context", "99", "--concurrency", "8")
    assert status == 0 and value(out, "completed") == "2"
    assert "workload: trace.csv; arriving as in the trace, at 40 times its speed, at most 8 at once" in out
    assert "skipped: 1 too long" in out


def test_every_request_fails(bench: Command, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    status, out, err = bench("-n", "3", "--model", "none", "--json", str(file))
    assert (status, err) == (1, "error: every request failed\n")
    assert value(out, "HTTP 404") == "3" and value(out, "time to first token (TTFT)") == "-"
    data = json.loads(file.read_text())
    assert data["summary"]["ttft"]["mean"] is None
    assert data["requests"][0]["failure"]["cause"] == "HTTP 404"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "0"), "--rate and --trace-speed must be above 0"),
        (("--trace-speed", "nan"), "--rate and --trace-speed must be above 0"),
        (("--trace-speed", "1"), "--trace-speed replays the arrivals of a --workload"),
        (("--trace-speed", "1", "--rate", "1"), "--rate and --trace-speed exclude each other"),
        (
            ("--workload", "x.csv", "--prompt-tokens", "1"),
            "--prompt-tokens, --output-tokens and --shared-prefix",
        ),
        (("--max-context", "9"), "--max-context is for what a --workload asks"),
        (("--workload", "none.csv"), "cannot read none.csv: No such file or directory"),
        (("--prompt-tokens", "9:1"), "--prompt-tokens '9:1': write a number"),
        (("--goodput", "ttft"), "--goodput 'ttft': write ttft, itl, tpot, e2e and milliseconds"),
        (("--extra-body", "{"), "--extra-body is not JSON"),
        (("--extra-body", "[]"), "--extra-body must be a JSON object"),
        (("--json", "no/such/folder/x.json"), "cannot write no/such/folder/x.json: there is no folder"),
        (("--plot", "x.gif"), "--plot x.gif: the name must end with .png, .svg"),
        (("--api-key", "wrong"), "http://127.0.0.1:"),
    ],
)
def test_an_error_is_one_line(bench: Command, arguments: tuple[str, ...], message: str) -> None:
    status, out, err = bench(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {message}") and err.count("\n") == 1
    assert KEY not in err


@pytest.mark.parametrize(("module", "option"), [("httpx", ()), ("matplotlib", ("--plot", "x.png"))])
def test_what_is_not_installed(
    bench: Command, monkeypatch: pytest.MonkeyPatch, module: str, option: tuple[str, ...]
) -> None:
    original = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == module:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return original(name, *arguments, **options)

    for name in [name for name in sys.modules if name.startswith("tenfold.loadtest.") and "workload" not in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    status, _, err = bench(*option)
    assert (status, err) == (1, f"error: {module} is not installed: run pip install 'tenfold[bench]'\n")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_figure(bench: Command, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"run{suffix}"
    assert bench("-n", "4", "--output-tokens", "5", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_ctrl_c_prints_what_was_measured(live: Live, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    arguments = ("-n", "100000", "--prompt-tokens", "5", "--output-tokens", "2", "--concurrency", "2")
    command = [sys.executable, "-m", "tenfold.cli", "bench", "serve", live.url, *LETTERS, *arguments, "--json", file]
    environment = os.environ | {"TENFOLD_API_KEY": KEY}
    before = sum(live.stats["requests"].values())
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        live.wait_until(lambda stats: sum(stats["requests"].values()) > before + 10, seconds=20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")
    assert "interrupted: this is what was measured until then" in out
    done = int(value(out, "completed"))
    assert done > 0 and value(out, "unfinished") == f"{100_000 - done:,}"
    assert json.loads(file.read_text())["interrupted"]
