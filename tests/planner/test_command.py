"""``tenfold plan`` as its users see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tenfold import planner

PLAN = ("plan", "qwen3.8-27b", "--pool", "23859MiB", "--context", "32768")


def numbers(text: str, start: str) -> list[str]:
    """The line that starts with ``start``, as words."""
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line.removeprefix(start).split()


def test_one_screen(command) -> None:
    status, out, err = command(*PLAN, "--verify")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 120
    assert numbers(out, "  token")[-3:] == ["65,536", "64", "KiB"]
    assert numbers(out, "  block of 16")[-4:] == ["1,048,576", "1", "MiB", "1"]
    assert numbers(out, "  state slot")[-4:] == ["153,944,064", "146.8", "MiB", "147"]
    assert "reserved for 262,144 tokens                    1   16.1 GiB each" in out
    assert "paged at 32,768 tokens                        10    2.1 GiB each   10 times as many" in out
    assert "256 KiB per token, 4 times too much; 2 sessions instead of 10" in out
    assert "784 tokens, 51.38 MB; 45 blocks a session: 10 sessions" in out
    assert out.endswith("verified: the allocator admitted 10 sessions of 32,768 tokens and no more\n")


def test_the_readme_shows_what_it_prints(command) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("$ tenfold plan ")[2].partition("\n```")[0]
    arguments, _, screen = shown.partition("\n")
    beginning, _, end = screen.partition("...\n")
    _, out, _ = command("plan", *arguments.split())
    assert beginning and end and out.startswith(beginning) and out.endswith(end + "\n")


def test_json(command) -> None:
    status, out, _ = command(*PLAN, "--json", "--verify")
    found = json.loads(out)
    assert status == 0
    assert found["token_bytes"] == 65_536 and found["state"] == {
        "bytes": 153_944_064,
        "pages": 147,
        "padding_bytes": 196_608,
    }
    assert (found["reserved"]["sessions"], found["paged"]["sessions"], found["verified_sessions"]) == (1, 10, 10)
    assert found["padded_blocks"]["block_tokens"] == 784
    dense = json.loads(command("plan", "--pool", "1GiB", "--json", "--dtype", "float32")[1])
    assert (dense["token_bytes"], dense["padded_blocks"]) == (46_080, None)


def test_a_device(command) -> None:
    _, out, _ = command("plan", "qwen3.8-27b", "--device", "80GB")
    assert "80 GB - 53.79 GB weights (26,895,998,464 parameters, counted from the configuration) - 1 GB reserve" in out
    rest = ("--weights", "54GB", "--reserve", "0", "--json")
    rest = ("--weights", "54GB", "--reserve", "0", "--json")
    found = json.loads(command("plan", "qwen3.8-27b", "--device", "80GB", *rest)[1])
    assert found["pool"]["bytes"] == 26 * 10**9


def test_a_pool_too_small_for_the_context_says_what_fits(command) -> None:
    status, out, _ = command("plan", "qwen3.8-27b", "--pool", "1GiB", "--verify")
    assert status == 0
    assert "the longest session that fits has 14,032 tokens" in out


def test_an_allocator_that_disagrees_is_an_error(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "sessions_admitted", lambda cache, context: 9)
    status, out, err = command(*PLAN, "--verify")
    assert (status, out) == (1, "")
    assert err == "error: the arithmetic says 10 sessions of 32,768 tokens and the allocator admitted 9\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", "--pool", "1GiB"), "'nothing' is no file or folder here"),
        (("qwen3.8-27b",), "give either --pool"),
        (("qwen3.8-27b", "--pool", "1GiB", "--device", "2GiB"), "give either --pool"),
        (("qwen3.8-27b", "--pool", "1GiB", "--weights", "1GB"), "--weights and --reserve go with --device"),
        (("qwen3.8-27b", "--pool", "lots"), "'lots' is not a size"),
        (("qwen3.8-27b", "--pool", "1MiB"), "an arena of 1,048,576 bytes is too small"),
        (("qwen3.8-27b", "--device", "24GB"), "nothing is left for a pool"),
        (("qwen3.8-27b", "--pool", "1GiB", "--context", "300000"), "qwen3.8-27b has contexts of 1 to 262,144"),
    ],
)
def test_an_error_is_one_line(command, arguments: tuple[str, ...], message: str) -> None:
    status, out, err = command("plan", *arguments)
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_a_configuration_with_an_unknown_layer(command, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    config = dict(planner.describe("smollm2-135m-instruct").config)
    file.write_text(json.dumps(config | {"layer_types": ["sliding_attention"] * 30}))
    status, _, err = command("plan", str(file), "--pool", "1GiB")
    assert status == 1 and "has a layer of type 'sliding_attention'" in err and err.count("\n") == 1


def test_it_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['tenfold', *sys.argv[1:]]\n"
        "from tenfold.cli import app; app(standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code, *PLAN, "--verify"], check=True, stdout=subprocess.DEVNULL)
