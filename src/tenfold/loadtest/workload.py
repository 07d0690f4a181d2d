"""What is asked of a server: made-up requests, or those of a file, and the moments at which they are due.

Prompts are made up when they are sent, from their name and length alone: a trace of millions of tokens costs no memory,
and the same seed asks the same again.
"""

from __future__ import annotations

import csv
import json
import math
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from tenfold.errors import TenfoldError, shortened

MOONCAKE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

_COMMON = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years where much your way down should because long
each just state those people too little good world make very year still see own work men day get here old life
"""
WORDS = _COMMON.split()
"""Common English words: with a space before it, each is one token in almost every vocabulary."""


class Endpoint(StrEnum):
    """What a server is asked for."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/chat/completions" if self is Endpoint.CHAT else "/completions"


class PromptKind(StrEnum):
    """How a prompt is sent."""

    TOKENS = "tokens"
    TEXT = "text"


class TooLong(StrEnum):
    """What becomes of a request that is longer than the context."""

    SKIP = "skip"
    CLIP = "clip"


class Span(NamedTuple):
    """Whole numbers from ``low`` to ``high``, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str, least: int = 1) -> Span:
        """``"512"`` or ``"32:1024"``. Raises TenfoldError, which names ``option``."""
        low, colon, high = text.partition(":")
        try:
            span = cls(int(low), int(high if colon else low))
        except ValueError:
            span = cls(least, least - 1)
        if not least <= span.low <= span.high:
            raise TenfoldError(f"{option} {text!r}: write a number such as 512, or low:high such as 32:1024")
        return span

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"

    def uniform(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def log_uniform(self, source: random.Random) -> int:
        """As many numbers from each doubling, which is how the lengths of prompts spread in practice."""
        drawn = math.exp(source.uniform(math.log(self.low), math.log(self.high + 1)))
        return min(max(int(drawn), self.low), self.high)


@dataclass(frozen=True, slots=True)
class Prompt:
    """``tokens`` long. Given as ``token_ids``, perhaps with their ``text``; otherwise made up out of ``parts``.

    A part is a name and a length in tokens: equal names begin with equal tokens, in every prompt and every run.
    """

    tokens: int
    parts: tuple[tuple[str, int], ...] = ()
    token_ids: array[int] | None = None
    text: str | None = None

    def require(self, kind: PromptKind) -> None:
        """Raises TenfoldError if the prompt is given, and not as ``kind``: there is no tokenizer here."""
        if kind is PromptKind.TEXT and self.text is None and self.token_ids is not None:
            raise TenfoldError("a prompt is token ids without a text: --endpoint completions --prompts tokens sends it")

    def as_token_ids(self, vocabulary: Span) -> list[int]:
        """The token ids; made-up ones are from ``vocabulary``."""
        if self.token_ids is not None:
            return self.token_ids.tolist()
        ids = range(vocabulary.low, vocabulary.high + 1)
        return [token for name, length in self.parts for token in random.Random(name).choices(ids, k=length)]

    def as_text(self) -> str:
        """The text; made-up ones have a word for each token. Raises TenfoldError if only token ids are given."""
        self.require(PromptKind.TEXT)
        if self.text is not None:
            return self.text
        return " ".join(word for name, length in self.parts for word in random.Random(name).choices(WORDS, k=length))

    def clipped(self, tokens: int) -> Prompt:
        """The first ``tokens`` of it. Of a text, which cannot be counted here, as large a share of the characters."""
        left, parts = tokens, []
        for name, length in self.parts:
            if left > 0:
                parts.append((name, min(length, left)))
            left -= length
        return Prompt(
            tokens,
            tuple(parts),
            None if self.token_ids is None else self.token_ids[:tokens],
            None if self.text is None else self.text[: max(1, len(self.text) * tokens // self.tokens)],
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, the tokens to generate, and in a trace its ``arrival`` in seconds, on the clock of the trace."""

    prompt: Prompt
    output_tokens: int
    arrival: float | None = None


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are sent; how many of a file were ``skipped``, by reason, or ``clipped``."""

    name: str
    requests: list[Request]
    skipped: Mapping[str, int] = field(default_factory=dict)
    clipped: int = 0


def made_up(count: int, prompt_tokens: Span, output_tokens: Span, shared_prefix: int = 0, seed: int = 0) -> Workload:
    """``count`` requests: lengths of prompts log-uniform, of outputs uniform, drawn with ``seed``.

    Args:
        shared_prefix: tokens that all prompts begin with, before the ``prompt_tokens`` of their own.
    """
    source = random.Random(seed)
    requests = []
    for place in range(count):
        own = prompt_tokens.log_uniform(source)
        shared = ((f"{seed}/shared", shared_prefix),) if shared_prefix else ()
        prompt = Prompt(shared_prefix + own, (*shared, (f"{seed}/{place}", own)))
        requests.append(Request(prompt, output_tokens.uniform(source)))
    prefix = f" after {shared_prefix:,} that all share" if shared_prefix else ""
    name = f"prompts of {prompt_tokens} tokens{prefix}, outputs of {output_tokens}, seed {seed}"
    return Workload(name, requests)


def warm_up(workload: Workload, count: int, seed: int = 0) -> list[Request]:
    """``count`` requests as long as those of ``workload`` and with other prompts, so that none of it gets cached."""
    requests = workload.requests
    return [
        Request(Prompt(like.prompt.tokens, ((f"{seed}/warm-up/{place}", like.prompt.tokens),)), like.output_tokens)
        for place, like in ((place, requests[place % len(requests)]) for place in range(count))
    ]


def due_times(
    workload: Workload, rate: float = math.inf, trace_speed: float | None = None, seed: int = 0
) -> list[float]:
    """When each request is due, in seconds from the start.

    Args:
        rate: requests per second of a Poisson process, drawn with ``seed``; infinite is all at once.
        trace_speed: replay the arrivals of the trace this many times as fast, instead of ``rate``.

    Raises:
        TenfoldError: arrivals are asked for and the workload has none.
    """
    if trace_speed is not None:
        arrivals = [request.arrival for request in workload.requests if request.arrival is not None]
        if len(arrivals) < len(workload.requests):
            raise TenfoldError(f"{workload.name} does not say when its requests arrive: leave out --trace-speed")
        return [(arrival - arrivals[0]) / trace_speed for arrival in arrivals]
    if math.isinf(rate):
        return [0.0] * len(workload.requests)
    source = random.Random(f"{seed}/arrivals")
    return list(accumulate(source.expovariate(rate) for _ in workload.requests))


def read_workload(
    path: Path,
    limit: int | None = None,
    max_context: int | None = None,
    too_long: TooLong = TooLong.SKIP,
    seed: int = 0,
) -> Workload:
    """Read a file, in order of arrival: JSON with ``requests`` of token ids, JSONL or CSV.

    JSONL has the fields of Mooncake (``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``) or token
    ids (``input_tok_ids``, ``output_toks``, ``arrival_time_ns``). CSV has columns for the lengths of prompt and output,
    and perhaps for the arrival: a number of seconds or a date with a time. Prompts that are not given are made up.

    Args:
        limit: stop after this many requests.
        max_context: tokens that prompt and output may have together; what is longer is treated as ``too_long`` says.

    Raises:
        TenfoldError: the file is missing or malformed; the message has the number of the line.
    """
    readers = {".json": _read_json, ".jsonl": _read_jsonl, ".csv": _read_csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise TenfoldError(f"{path} is no workload: its name must end with {', '.join(readers)}")
    requests: list[Request] = []
    skipped: Counter[str] = Counter()
    clipped = 0
    try:
        for request in reader(path, seed):
            if limit is not None and len(requests) == limit:
                break
            length = request.prompt.tokens + request.output_tokens
            if not request.prompt.tokens or not request.output_tokens:
                skipped["without tokens"] += 1
            elif max_context is None or length <= max_context:
                requests.append(request)
            elif too_long is TooLong.SKIP:
                skipped["too long"] += 1
            else:
                requests.append(_clipped(request, max_context))
                clipped += 1
    except OSError as error:
        raise TenfoldError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TenfoldError(f"{path} is not UTF-8 text: {error.reason}") from error
    if not requests:
        raise TenfoldError(f"{path} has no requests to send" + (f": {listed(skipped)}" if skipped else ""))
    requests.sort(key=lambda request: request.arrival or 0.0)
    return Workload(path.name, requests, skipped, clipped)


def _clipped(request: Request, max_context: int) -> Request:
    output = min(request.output_tokens, max_context - 1)
    tokens = min(request.prompt.tokens, max_context - output)
    return replace(request, prompt=request.prompt.clipped(tokens), output_tokens=output)


def listed(skipped: Mapping[str, int]) -> str:
    """``"2 too long, 1 without tokens"``."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())


def _read_json(path: Path, seed: int) -> Iterator[Request]:
    content = _parsed(path.read_text(encoding="utf-8"), path)
    if not isinstance(content, dict) or not isinstance(content.get("requests"), list):
        raise TenfoldError(f"{path} must be an object with a list of requests")
    for place, entry in enumerate(content["requests"]):
        fields = _Fields(entry, f"{path} requests[{place}]")
        text = entry.get("text")
        if text is not None and not isinstance(text, str):
            raise TenfoldError(f"{fields.where}: text must be a string, not {shortened(text)}")
        ids = fields.token_ids("prompt_token_ids")
        yield Request(Prompt(len(ids), token_ids=ids, text=text), fields.count("output_len"))


def _read_jsonl(path: Path, seed: int) -> Iterator[Request]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            where = f"{path} line {number}"
            fields = _Fields(_parsed(line, path, number), where)
            if "input_tok_ids" in fields.values:
                ids = fields.token_ids("input_tok_ids")
                arrival = fields.number("arrival_time_ns", 1e9)
                yield Request(Prompt(len(ids), token_ids=ids), fields.count("output_toks"), arrival)
            elif "hash_ids" in fields.values:
                yield _mooncake(fields, f"{seed}/{number}", seed)
            else:
                raise TenfoldError(f"{where}: neither hash_ids (Mooncake) nor input_tok_ids (token ids) is there")


def _mooncake(fields: _Fields, own_name: str, seed: int) -> Request:
    """Each hash id names 512 tokens of the prompt, the last what is left; tokens that none names are its own."""
    length, hashes = fields.count("input_length"), fields.values["hash_ids"]
    if not isinstance(hashes, list):
        raise TenfoldError(f"{fields.where}: hash_ids must be a list, not {shortened(hashes)}")
    names = [*(f"{seed}/hash/{each}" for each in hashes[: -(-length // MOONCAKE_BLOCK)])]
    parts = [(name, min(MOONCAKE_BLOCK, length - place * MOONCAKE_BLOCK)) for place, name in enumerate(names)]
    if (rest := length - len(names) * MOONCAKE_BLOCK) > 0:
        parts.append((own_name, rest))
    return Request(Prompt(length, tuple(parts)), fields.count("output_length"), fields.number("timestamp", 1e3))


CSV_PROMPT = ("contexttokens", "prompt_len", "prompt_tokens", "num_prefill_tokens", "input_length")
CSV_OUTPUT = ("generatedtokens", "output_len", "output_tokens", "num_decode_tokens", "output_length")
CSV_ARRIVAL = ("timestamp", "req_time", "arrival", "arrival_time")
"""Names of columns, in lower case."""


def _read_csv(path: Path, seed: int) -> Iterator[Request]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            header = [name.strip().lower() for name in next(rows, [])]
            prompt, output = _column(header, CSV_PROMPT, path), _column(header, CSV_OUTPUT, path)
            arrival = next((header.index(name) for name in CSV_ARRIVAL if name in header), None)
            for row in rows:
                where = f"{path} line {rows.line_num}"
                if not row:
                    continue
                if len(row) != len(header):
                    raise TenfoldError(f"{where}: {len(row)} columns where the first line has {len(header)}")
                tokens = _count(row[prompt], where, header[prompt])
                yield Request(
                    Prompt(tokens, ((f"{seed}/{rows.line_num}", tokens),)),
                    _count(row[output], where, header[output]),
                    None if arrival is None else _seconds(row[arrival], where, header[arrival]),
                )
        except csv.Error as error:
            raise TenfoldError(f"{path} line {rows.line_num}: {error}") from error


def _column(header: list[str], names: Iterable[str], path: Path) -> int:
    found = next((header.index(name) for name in names if name in header), None)
    if found is None:
        raise TenfoldError(f"{path} line 1: no column is named {' or '.join(names)}")
    return found


@dataclass(frozen=True)
class _Fields:
    """An object of a JSON file; ``where`` says which, for errors."""

    values: Any
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.values, dict):
            raise TenfoldError(f"{self.where}: must be an object, not {shortened(self.values)}")

    def count(self, name: str) -> int:
        return _count(self.values.get(name), self.where, name)

    def number(self, name: str, divisor: float) -> float | None:
        """A number of seconds out of one that counts ``divisor`` a second; None if it is not there."""
        found = self.values.get(name)
        return None if found is None else _seconds(found, self.where, name) / divisor

    def token_ids(self, name: str) -> array[int]:
        """Four bytes for each token, where a list would take dozens."""
        try:
            return array("I", self.values.get(name))
        except (TypeError, OverflowError):
            raise TenfoldError(f"{self.where}: {name} must be a list of token ids") from None


def _parsed(text: str, path: Path, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise TenfoldError(f"{path} line {line}: {error.msg} at column {error.colno}") from None


def _count(found: Any, where: str, name: str) -> int:
    try:
        count = int(found) if isinstance(found, str | int) and not isinstance(found, bool) else -1
    except ValueError:
        count = -1
    if count < 0:
        raise TenfoldError(f"{where}: {name} must be a number of tokens, not {shortened(found)}")
    return count


def _seconds(found: Any, where: str, name: str) -> float:
    """A number, or a date and a time as seconds since 1970."""
    try:
        seconds = float(found)
    except (TypeError, ValueError):
        try:
            moment = datetime.fromisoformat(str(found))
        except ValueError:
            seconds = math.nan
        else:
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise TenfoldError(f"{where}: {name} must be a number or a date and a time, not {shortened(found)}")
    return seconds
