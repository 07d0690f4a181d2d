"""The command line, around an engine without a model."""

from __future__ import annotations

import inspect
import io
import json
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from support.byte_tokenizer import ByteTokenizer
from support.serving import make_engine
from tenfold import __version__, cli
from tenfold.cli import options
from tenfold.cli.chat import Conversation, converse
from tenfold.cli.serve import announce
from tenfold.core import SamplingParams
from tenfold.errors import TenfoldError
from tenfold.server import ServerSettings
from tenfold.server.state import Served

runner = CliRunner()


class FakeLLM:
    """The part of ``tenfold.LLM`` that the commands use, on the scripted runner."""

    made: list[dict[str, Any]]

    def __init__(self, model: str, **options: Any) -> None:
        self.made.append({"model": model, **options})
        self.engine, _ = make_engine()
        self.tokenizer = ByteTokenizer()
        self.loaded = SimpleNamespace(name=model)

    def chat(self, conversations: list[Any], params: SamplingParams) -> list[Any]:
        return self.generate([conversation[0]["content"] for conversation in conversations], params)

    def generate(self, prompts: list[str], params: SamplingParams) -> list[Any]:
        outputs = []
        for prompt in prompts:
            texts = [
                SimpleNamespace(index=i, text=prompt.upper(), token_ids=[1, 2], finish_reason="stop")
                for i in range(params.n)
            ]
            outputs.append(SimpleNamespace(prompt_token_ids=list(prompt.encode()), outputs=texts))
        return outputs


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every LLM that a command made."""
    FakeLLM.made = []
    module = types.ModuleType("tenfold.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tenfold.llm", module)
    return FakeLLM.made


def test_importing_it_is_cheap() -> None:
    heavy = "{'torch', 'transformers', 'fastapi', 'uvicorn', 'huggingface_hub', 'numpy', 'openai', 'pydantic', 'httpx'}"
    code = f"import sys, tenfold.cli; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_server_loads_no_torch() -> None:
    code = (
        "import sys, tenfold.server.run; assert not {'torch', 'tenfold.runtime', 'tenfold.models'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version(command) -> None:
    assert command("--version") == (0, f"tenfold {__version__}\n", "")


def test_the_options_of_an_engine_are_the_same_everywhere_and_those_of_assemble() -> None:
    from tenfold.assembly import assemble

    group: Any = typer.main.get_command(cli.app)
    parameters = inspect.signature(assemble).parameters
    shared = inspect.signature(options._engine_options).parameters
    for command in ("serve", "generate", "chat"):
        found = {each.name: each for each in group.commands[command].params}
        for name in shared:
            assert found[name].default == parameters[name].default, f"{command} {name}"


def test_threads_are_set_once(monkeypatch) -> None:
    from tenfold import assembly

    seen: list[int] = []
    monkeypatch.setattr(assembly.torch, "set_num_threads", seen.append)
    with pytest.raises(TenfoldError, match="'no-such-model' is no local path"):
        assembly.assemble("no-such-model", threads=1)
    assert seen == [1]


def test_every_option_has_a_help_text() -> None:
    group: Any = typer.main.get_command(cli.app)
    assert set(group.commands) >= {"serve", "generate", "chat", "models", "bench"}
    for name, found in (group.commands | group.commands["bench"].commands).items():
        assert found.help, name
        for parameter in found.params:
            assert parameter.help, f"{name} {parameter.name}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--max-tokens", "0", "x"), "max_tokens must be at least 1, not 0"),
        (("generate", "--model", "no-such-model", "x"), "'no-such-model' is no local path"),
        (("serve", "--max-body", "huge"), "'huge' is not a size"),
        (("serve", "--api-key", " "), "an API key is empty"),
        (("serve", "--host", "no such host"), "cannot listen on no such host:8000"),
        (("serve", "--port", "0", "no-such-model"), "'no-such-model' is no local path"),
        (("serve", "--port", "0", "--profile", "/nowhere/trace.json"), "the profile /nowhere/trace.json cannot be"),
        (("serve", "--port", "0", "--profile", "/nowhere/trace.json", "--profile-limit", "x"), "'x' is not a size"),
        (("serve", "--port", "0", "--threads", "0"), "threads must be from 1 to "),
        (("generate", "--threads", "100000", "x"), "threads must be from 1 to "),
        (("chat", "--threads", "-1"), "threads must be from 1 to "),
        (("serve", "--port", "0", "--quantize", "x"), "quantize must be one of int8, int8-groups, int4, gguf, not 'x'"),
    ],
)
def test_an_error_is_one_line(command, arguments: tuple[str, ...], message: str) -> None:
    status, out, err = command(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_a_wrong_option(command) -> None:
    assert command("serve", "--port", "x")[0] == 2


def test_generate(command, made) -> None:
    status, out, _ = command("generate", "one", "two", "-n", "2", "--memory", "1GiB", "--temperature", "0")
    assert (status, out) == (0, "ONE\n\nONE\n\nTWO\n\nTWO\n")
    assert made[0]["memory"] == "1GiB" and made[0]["prefix_caching"] is True and made[0]["threads"] is None
    command("generate", "one", "--no-prefix-caching", "--threads", "1")
    assert made[1]["prefix_caching"] is False and made[1]["threads"] == 1
    command("generate", "one", "--quantize", "gguf")
    assert [each["quantize"] for each in made] == [None, None, "gguf"]
    status, out, _ = command("generate", "--chat", "hi", "--json")
    assert json.loads(out)["outputs"][0] == {
        "prompt": "hi",
        "prompt_tokens": 2,
        "completions": [{"index": 0, "text": "HI", "tokens": 2, "finish_reason": "stop"}],
    }


def test_generate_from_standard_input(made) -> None:
    assert runner.invoke(cli.app, ["generate"], input="from a\npipe\n").output == "FROM A\nPIPE\n"
    failed = runner.invoke(cli.app, ["generate"], input="")
    assert failed.exit_code == 1 and "standard input is empty" in str(failed.exception)


def test_chat_answers_a_pipe_once(made) -> None:
    assert runner.invoke(cli.app, ["chat"], input="two lines\nsay [[once]]\n").output == "once\n"
    assert runner.invoke(cli.app, ["chat", "--no-prefix-caching"], input="say [[once]]\n").output == "once\n"
    assert [options["prefix_caching"] for options in made] == [True, False]


@pytest.fixture
def conversation() -> Iterator[Conversation]:
    engine, _ = make_engine()
    made = Conversation(engine, ByteTokenizer(), SamplingParams(max_tokens=None), "be nice")
    yield made
    assert engine.scheduler.cache.available == engine.scheduler.spec.num_pages


def talk(monkeypatch: pytest.MonkeyPatch, conversation: Conversation, *lines: str | type[BaseException]) -> None:
    pending = iter(lines)

    def read(prompt: str) -> str:
        line = next(pending, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    converse(conversation)


def test_a_conversation(monkeypatch, capsys, conversation: Conversation) -> None:
    talk(monkeypatch, conversation, "say [[one]]", "", KeyboardInterrupt, "say [[two]]", "/what")
    assert [message["content"] for message in conversation.messages[1:]] == ["say [[one]]", "one", "say [[two]]", "two"]
    out = capsys.readouterr().out
    assert "\none\n" in out and "\ntwo\n" in out and out.count("/reset forgets") == 3
    talk(monkeypatch, conversation, "/reset", "say [[three]]", "/quit", "say [[never]]")
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]


def test_an_interrupt_stops_the_answer_only(monkeypatch, capsys, conversation: Conversation) -> None:
    steps = iter(range(10**6))
    collect = conversation._engine.runner.collect

    def collect_and_interrupt() -> Any:
        if next(steps) == 5:
            signal.raise_signal(signal.SIGINT)
        return collect()

    monkeypatch.setattr(conversation._engine.runner, "collect", collect_and_interrupt)
    talk(monkeypatch, conversation, "go on", "say [[more]]")
    assert [message["content"] for message in conversation.messages[2::2]] == ["abcdef", "more"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_leaves_the_conversation(monkeypatch, capsys, conversation: Conversation) -> None:
    talk(monkeypatch, conversation, "x" * 3000, "say [[fine]]")
    assert [message["content"] for message in conversation.messages[1:]] == ["say [[fine]]", "fine"]
    assert "error: the prompt has 30" in capsys.readouterr().err


def test_models(command, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    status, out, _ = command("models")
    assert status == 0 and "smollm2-135m-instruct" in out and "fetched on first use" in out
    status, out, _ = command("models", "--json")
    entries = json.loads(out)
    assert entries[0]["name"] == "smollm2-135m-instruct" and entries[0]["path"] is None
    assert set(entries[0]) == {"name", "kind", "bytes", "path", "summary"}


def test_the_line_that_says_where(capsys) -> None:
    served = Served(make_engine()[0], ByteTokenizer(), "it's")
    announce(served, "0.0.0.0", 80, ServerSettings(api_keys=("secret",)))
    out = capsys.readouterr().out
    assert "http://127.0.0.1:80/v1" in out and "secret" not in out
    curl = subprocess.run(
        ["bash", "-c", out.splitlines()[1].replace("curl", "printf '%s\\n'", 1)], capture_output=True, text=True
    )
    assert json.loads(curl.stdout.splitlines()[-1])["model"] == "it's"


def test_serve_hands_its_options_on(command, monkeypatch) -> None:
    seen: dict[str, Any] = {}
    assembled = SimpleNamespace(
        engine=make_engine()[0], loaded=SimpleNamespace(name="m", require_tokenizer=ByteTokenizer)
    )
    module = types.ModuleType("tenfold.assembly")
    module.assemble = lambda model, **options: seen.update(options, model=model) or assembled  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tenfold.assembly", module)

    def run(load: Any, listener: Any, settings: ServerSettings, ready: Any) -> None:
        listener.close()
        seen["settings"] = settings
        ready(load())

    monkeypatch.setattr("tenfold.server.run.run", run)
    monkeypatch.setenv("TENFOLD_API_KEY", "one two")
    given = ("--port", "0", "--max-body", "1MiB", "--served-model-name", "a", "--served-model-name", "b")
    status, out, _ = command(
        "serve", "some-model", *given, "--max-queue-requests", "7", "--block-size", "32", "--profile", "t.json"
    )
    assert seen["prefix_caching"] is True
    assert status == 0 and out.startswith("Serving m at http://127.0.0.1:")
    assert seen["settings"] == ServerSettings(("a", "b"), ("one", "two"), 2**20)
    assert (seen["profile"], seen["profile_limit"], seen["threads"]) == (Path("t.json"), "256MiB", None)
    assert (seen["model"], seen["max_queue"], seen["block_size"], seen["memory"]) == ("some-model", 7, 32, "2GiB")


def test_standard_input_is_not_waited_for(monkeypatch, command, made) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert command("generate")[2] == "error: there is no prompt: give one as an argument or on standard input\n"
