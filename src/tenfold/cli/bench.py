"""``tenfold bench``: measuring a server from outside."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenfold.errors import TenfoldError
from tenfold.loadtest.workload import (
    Endpoint,
    PromptKind,
    Span,
    TooLong,
    Workload,
    due_times,
    listed,
    made_up,
    read_workload,
    warm_up,
)

if TYPE_CHECKING:
    from tenfold.loadtest.measures import Record, Run

app = typer.Typer(help="Measure servers.", no_args_is_help=True)

WORKLOAD_PANEL, LOAD_PANEL, RESULT_PANEL = "Workload", "Load", "Results"
DEFAULT_PROMPTS, DEFAULT_OUTPUTS, DEFAULT_REQUESTS = "32:1024", "16:256", 64

WORKLOAD_HELP = (
    "Send the requests of this file instead of made-up ones: JSON with requests of prompt_token_ids and output_len; "
    "JSONL of Mooncake, or with input_tok_ids; CSV of Azure, VTC, or with prompt_len and output_len. What it does not "
    "say of prompts is made up."
)
SEED_HELP = (
    "For made-up prompts, lengths and arrivals. The same seed asks the same again, and a server that caches prefixes "
    "then answers from its cache: take another seed for another run."
)
CONCURRENCY_HELP = (
    "Requests under way at once at most. Without --rate and --trace-speed, each request is due when the one before it "
    "ends; with them, the time for which it is held back counts as latency."
)
GOODPUT_HELP = (
    "Count requests within a limit in ms, such as ttft:500, itl:50 (mean gap between chunks), tpot:40 or e2e:5000; may "
    "be repeated: goodput is the requests per second that keep to all."
)


def _option(panel: str, help: str, *names: str, default: bool = False, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=default, **settings)


@app.callback()
def _bench() -> None:
    """Measure servers."""


@app.command()
def serve(
    context: typer.Context,
    url: Annotated[
        str, typer.Argument(help="Root of a server that speaks OpenAI's HTTP, or its URL up to /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model to ask for; by default the first that it lists.")
    ] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="What to ask for.")] = Endpoint.COMPLETIONS,
    prompts: Annotated[
        PromptKind, typer.Option(help="How prompts of completions are sent; chats are always text.")
    ] = PromptKind.TOKENS,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key to send; it is shown nowhere.", envvar="TENFOLD_API_KEY", show_default=False),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling.", min=0)] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Send ignore_eos, so that outputs are as long as asked; servers that do not know it may refuse."
        ),
    ] = True,
    extra_body: Annotated[
        str | None,
        typer.Option(
            help="JSON object whose fields go into the body of every request, and into --json.", metavar="JSON"
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take in all.", min=0.001)] = 600.0,
    requests: Annotated[
        int | None,
        _option(
            WORKLOAD_PANEL,
            f"Requests to send; by default {DEFAULT_REQUESTS}, or all of --workload.",
            "--requests",
            "-n",
            min=1,
        ),
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        _option(
            WORKLOAD_PANEL,
            f"Length of made-up prompts: a number or a range, log-uniform; by default {DEFAULT_PROMPTS}.",
            metavar="N|LOW:HIGH",
        ),
    ] = None,
    output_tokens: Annotated[
        str | None,
        _option(
            WORKLOAD_PANEL,
            f"Length of outputs to made-up prompts: a number or a range, uniform; by default {DEFAULT_OUTPUTS}.",
            metavar="N|LOW:HIGH",
        ),
    ] = None,
    shared_prefix: Annotated[
        int | None,
        _option(WORKLOAD_PANEL, "Tokens that all made-up prompts begin with, before those of --prompt-tokens.", min=0),
    ] = None,
    token_ids: Annotated[
        str, _option(WORKLOAD_PANEL, "Token ids of made-up prompts.", metavar="LOW:HIGH", default=True)
    ] = "1000:29999",
    workload: Annotated[Path | None, _option(WORKLOAD_PANEL, WORKLOAD_HELP, metavar="FILE")] = None,
    max_context: Annotated[
        int | None,
        _option(WORKLOAD_PANEL, "Tokens that prompt and output of --workload may have together.", min=2),
    ] = None,
    too_long: Annotated[
        TooLong, _option(WORKLOAD_PANEL, "What to do with what is longer than --max-context.", default=True)
    ] = TooLong.SKIP,
    seed: Annotated[int, _option(WORKLOAD_PANEL, SEED_HELP, default=True)] = 0,
    rate: Annotated[
        float,
        _option(LOAD_PANEL, "Requests per second that arrive at random (Poisson); inf is all at once.", default=True),
    ] = math.inf,
    trace_speed: Annotated[
        float | None, _option(LOAD_PANEL, "Replay the arrivals in --workload this many times as fast.")
    ] = None,
    concurrency: Annotated[int | None, _option(LOAD_PANEL, CONCURRENCY_HELP, min=1)] = None,
    warmup: Annotated[
        int,
        _option(LOAD_PANEL, "Requests to send before, with prompts of their own; not counted.", min=0, default=True),
    ] = 0,
    goodput: Annotated[list[str] | None, _option(RESULT_PANEL, GOODPUT_HELP, metavar="GOAL:MS")] = None,
    json_file: Annotated[
        Path | None,
        _option(RESULT_PANEL, "Write the summary and every request to this file.", "--json", metavar="FILE"),
    ] = None,
    plot_file: Annotated[
        Path | None,
        _option(RESULT_PANEL, "Draw latencies and throughput to this .png or .svg.", "--plot", metavar="FILE"),
    ] = None,
) -> None:
    """Send a server many requests, and measure how soon and how fast it answers.

    Latencies count from the moment at which a request was due to be sent.
    """
    if not rate > 0 or (trace_speed is not None and not 0 < trace_speed < math.inf):
        raise TenfoldError("--rate and --trace-speed must be above 0")
    if trace_speed is not None and not math.isinf(rate):
        raise TenfoldError("--rate and --trace-speed exclude each other: leave one out")
    if trace_speed is not None and workload is None:
        raise TenfoldError("--trace-speed replays the arrivals of a --workload: give one, or use --rate")
    if workload is not None and any(given is not None for given in (prompt_tokens, output_tokens, shared_prefix)):
        raise TenfoldError("--prompt-tokens, --output-tokens and --shared-prefix are for requests without --workload")
    if workload is None and max_context is not None:
        raise TenfoldError("--max-context is for what a --workload asks: shorten --prompt-tokens or --output-tokens")
    for path in (json_file, plot_file):
        if path is not None and not path.absolute().parent.is_dir():
            raise TenfoldError(f"cannot write {path}: there is no folder {path.parent}")
    try:
        from tenfold.loadtest.client import Target, base_url, without_password
    except ModuleNotFoundError as error:
        raise TenfoldError(f"{error.name} is not installed: run pip install 'tenfold[bench]'") from error
    from tenfold.loadtest import plot
    from tenfold.loadtest.load import Load, measure
    from tenfold.loadtest.measures import parse_goals, summarize
    from tenfold.loadtest.report import as_data, as_text

    if plot_file is not None:
        plot.require(plot_file)
    goals = parse_goals(goodput or ())
    target = Target(
        url=url,
        model=model,
        endpoint=endpoint,
        prompts=prompts,
        # The variable may have several keys, of which the server takes any.
        api_key=next(iter((api_key or "").split()), None),
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra=_extra_fields(extra_body),
        timeout=timeout,
        vocabulary=Span.parse(token_ids, "--token-ids", least=0),
    )
    if workload is not None:
        found = read_workload(workload, requests, max_context, too_long, seed)
    else:
        found = made_up(
            requests or DEFAULT_REQUESTS,
            Span.parse(prompt_tokens or DEFAULT_PROMPTS, "--prompt-tokens"),
            Span.parse(output_tokens or DEFAULT_OUTPUTS, "--output-tokens"),
            shared_prefix or 0,
            seed,
        )
    closed = concurrency is not None and trace_speed is None and math.isinf(rate)
    load = Load(found.requests, due_times(found, rate, trace_speed, seed), concurrency, closed)
    shown = without_password(base_url(url))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with _progress(len(found.requests)) as note:
        model, run = measure(target, load, warm_up(found, warmup, seed), note=note)
    if not run.records:
        raise TenfoldError("interrupted before any request had ended: nothing was measured")

    summary = summarize(run, goals)
    heading = f"{len(run.records):,} requests to {model} at {shown}{endpoint.path} in {run.seconds:,.1f} s"
    typer.echo(as_text(summary, heading, _notes(found, rate, trace_speed, concurrency, run)))
    if json_file is not None:
        settings = _settings(context.params) | {
            "url": shown,
            "model": model,
            "started": started,
            "requests": len(found.requests),
            "skipped": found.skipped,
            "clipped": found.clipped,
        }
        _write(json_file, json.dumps(as_data(run, summary, settings), allow_nan=False))
    if plot_file is not None:
        plot.draw(run, summary, heading, plot_file)
    if run.interrupted:
        raise typer.Exit(130)
    if not summary.completed:
        raise TenfoldError("every request failed")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Record], None]]:
    """A bar on standard error if that is a terminal, and what moves it on."""
    from tqdm import tqdm

    with tqdm(total=total, unit="request", disable=None, leave=False, dynamic_ncols=True) as bar:
        failed = 0

        def note(record: Record) -> None:
            nonlocal failed
            if record.failure is not None:
                failed += 1
                bar.set_postfix(failed=failed, refresh=False)
            bar.update()

        yield note


def _notes(workload: Workload, rate: float, trace_speed: float | None, concurrency: int | None, run: Run) -> list[str]:
    """What was sent, and when: one line each."""
    if trace_speed is not None:
        when = f"arriving as in the trace, at {trace_speed:g} times its speed"
    elif not math.isinf(rate):
        when = f"arriving at random, {rate:g} a second"
    else:
        when = "all at once" if concurrency is None else "each as soon as another ends"
    limit = "" if concurrency is None else f", at most {concurrency:,} at once"
    notes = [f"workload: {workload.name}; {when}{limit}"]
    if workload.skipped:
        notes.append(f"skipped: {listed(workload.skipped)}")
    if workload.clipped:
        notes.append(f"clipped to --max-context: {workload.clipped:,}")
    if run.interrupted:
        notes.append("interrupted: this is what was measured until then")
    return notes


def _extra_fields(text: str | None) -> dict[str, Any]:
    try:
        fields = {} if text is None else json.loads(text)
    except ValueError as error:
        raise TenfoldError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TenfoldError("--extra-body must be a JSON object")
    return fields


def _settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """Options as plain data, all but the secret one."""
    plain: dict[str, Any] = {}
    for name, value in params.items():
        if name == "api_key":
            continue
        if isinstance(value, Enum):
            value = value.value
        elif isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
            value = str(value)
        plain[name] = value
    return plain


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TenfoldError(f"cannot write {path}: {error.strerror or error}") from error
