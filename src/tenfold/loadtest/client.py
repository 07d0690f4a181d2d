"""One request to an OpenAI-compatible server, streamed, and what it took."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import httpx

from tenfold import __version__
from tenfold.errors import TenfoldError
from tenfold.loadtest.measures import Failure, Record
from tenfold.loadtest.sse import EventParser
from tenfold.loadtest.workload import Endpoint, PromptKind, Request, Span

CONTENT_FIELDS = ("content", "reasoning_content", "reasoning")
"""Where servers put text in the delta of a chat's chunk."""
KEEP_ALIVE_SECONDS = 2.0
"""Shorter than servers keep an idle connection, so that none is used in the moment in which it is closed."""
MESSAGE_CHARACTERS = 200
ERROR_BYTES = 2**16
"""Of an answer that is an error: more of it is not read."""
MODELS_TIMEOUT_SECONDS = 30.0
VOCABULARY = Span(1000, 29_999)
"""Token ids that nearly every model has, and none of them special."""


@dataclass(frozen=True)
class Target:
    """Where requests go and what they say beside their prompt.

    ``url`` is the server's root or the part before ``/completions``; ``extra`` goes into every body; ``timeout`` is the
    time in seconds that one request may take in all; made-up prompts have token ids of ``vocabulary``.
    """

    url: str
    model: str | None = None
    endpoint: Endpoint = Endpoint.COMPLETIONS
    prompts: PromptKind = PromptKind.TOKENS
    api_key: str | None = field(default=None, repr=False)
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0
    vocabulary: Span = VOCABULARY

    @property
    def sends(self) -> PromptKind:
        """A chat's message is text; completions take either."""
        return PromptKind.TEXT if self.endpoint is Endpoint.CHAT else self.prompts


def base_url(url: str) -> str:
    """``url`` with a scheme, with ``/v1`` if it has no path, and without a slash at its end.

    Raises:
        TenfoldError: it is no address of an HTTP server.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise TenfoldError(
            f"{without_password(url)!r} is not the URL of a server: write for example http://127.0.0.1:8000"
        )
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") or "/v1"))


def without_password(url: str) -> str:
    """``url`` without the name and password that it may have, for people and files to see."""
    scheme, separator, rest = url.rpartition("://")
    host, slash, path = rest.partition("/")
    return scheme + separator + host.rpartition("@")[2] + slash + path


class Client:
    """Sends requests. An asynchronous context manager: leaving it closes the connections."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.url = base_url(target.url)
        headers = {"User-Agent": f"tenfold/{__version__}", "Accept-Encoding": "identity"}
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        try:
            self._headers = httpx.Headers(headers)
        except UnicodeEncodeError:
            raise TenfoldError("the API key has a character that a header cannot hold") from None
        self._ssl = httpx.create_ssl_context()
        self._idle: list[httpx.AsyncClient] = []
        self.model = target.model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for http in self._idle:
            await http.aclose()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client for one request, with the connection of one that is over if there is one.

        A pool that all requests share looks through all its connections for each of them, which takes seconds when
        hundreds of requests come at once. Here there are as many pools as requests at once, of one connection each.
        """
        http = self._idle.pop() if self._idle else self._connect()
        try:
            yield http
        finally:
            self._idle.append(http)

    def _connect(self) -> httpx.AsyncClient:
        limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS)
        return httpx.AsyncClient(headers=self._headers, limits=limits, timeout=None, verify=self._ssl)

    async def find_model(self) -> str:
        """The model to ask for: the one that is given, or the first that the server lists.

        Raises:
            TenfoldError: the server cannot be reached, refuses, or lists none.
        """
        if self.model is not None:
            return self.model
        url, shown = f"{self.url}/models", f"{without_password(self.url)}/models"
        try:
            async with self._connection() as http, http.stream("GET", url, timeout=MODELS_TIMEOUT_SECONDS) as response:
                if response.status_code != httpx.codes.OK:
                    said = self._shown(await _message(response))
                    raise TenfoldError(f"{shown} answered HTTP {response.status_code}: {said}")
                listed = await response.aread()
        except httpx.HTTPError as error:
            raise TenfoldError(f"cannot reach {shown}: {self._said(error)}") from error
        try:
            self.model = str(json.loads(listed)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise TenfoldError(f"{shown} lists no model: give one with --model") from None
        return self.model

    def body(self, request: Request) -> bytes:
        """The body to send. Raises TenfoldError if the prompt is not given in the form that is sent."""
        target = self.target
        if target.sends is PromptKind.TEXT:
            content: str | list[int] = request.prompt.as_text()
        else:
            content = request.prompt.as_token_ids(target.vocabulary)
        if target.endpoint is Endpoint.CHAT:
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
        else:
            prompt = {"prompt": content}
        options = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.ignore_eos:
            options["ignore_eos"] = True
        return json.dumps(options | prompt | dict(target.extra), separators=(",", ":")).encode()

    async def send(self, body: bytes, record: Record, clock: Callable[[], float]) -> None:
        """Send ``body`` and fill ``record``; whatever goes wrong becomes its ``failure``. ``clock`` counts seconds."""
        record.sent = clock()
        answer = _Answer(record)
        try:
            async with asyncio.timeout(self.target.timeout):
                await self._stream(body, answer, clock)
        except TimeoutError:
            self._fail(answer, "timeout", f"not answered within {self.target.timeout:g} s")
        except _ServerError as error:
            self._fail(answer, error.cause, str(error))
        except httpx.ConnectError as error:
            self._fail(answer, "not connected", self._said(error))
        except httpx.TransportError as error:
            self._fail(answer, "disconnected", self._said(error))
        except TenfoldError as error:
            self._fail(answer, "bad stream", str(error))
        except Exception as error:  # one request must not end the others
            self._fail(answer, type(error).__name__, str(error))
        if not answer.done:
            record.end = clock()
        answer.count()

    async def _stream(self, body: bytes, answer: _Answer, clock: Callable[[], float]) -> None:
        url = self.url + self.target.endpoint.path
        headers = {"Content-Type": "application/json"}
        async with self._connection() as http, http.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise _ServerError(f"HTTP {response.status_code}", await _message(response))
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise TenfoldError(f"the answer is {kind or 'of no known type'}, not a stream of events")
            parser = EventParser()
            async for received in response.aiter_bytes():
                now = clock()
                for event in parser.feed(received):
                    answer.take(event, now)
        if not answer.done:
            answer.finish(clock())

    def _fail(self, answer: _Answer, cause: str, message: str) -> None:
        # What comes after the end of an answer, such as a connection not closed in order, takes nothing from it.
        if not answer.done:
            answer.record.failure = Failure(cause, self._shown(message))

    def _said(self, error: Exception) -> str:
        return self._shown(str(error) or type(error).__name__)

    def _shown(self, message: str) -> str:
        """One line of bounded length; a server may repeat the key, which nobody is to see."""
        if self.target.api_key:
            message = message.replace(self.target.api_key, "[API key]")
        message = " ".join(message.split())
        return message if len(message) <= MESSAGE_CHARACTERS else message[:MESSAGE_CHARACTERS] + "..."


class _ServerError(Exception):
    """What the server itself says is wrong."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class _Answer:
    """A stream as it comes in, noted in a record. ``done`` once it is complete."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.done = False
        self._finish_reason = False
        self._usage: Mapping[str, Any] = {}

    def take(self, event: str, now: float) -> None:
        """Note the data of an event that came at ``now``.

        Raises:
            _ServerError: it is an error.
            TenfoldError: it is no chunk.
        """
        if event == "[DONE]":
            self.record.end, self.done = now, True
            return
        try:
            chunk = json.loads(event)
        except ValueError:
            raise TenfoldError(f"a chunk is not JSON: {event[:80]}") from None
        if not isinstance(chunk, dict):
            raise TenfoldError(f"a chunk is not an object: {event[:80]}")
        if chunk.get("error"):
            raise _ServerError("server error", _error_message(chunk))
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        self._finish_reason |= choice.get("finish_reason") is not None
        if _has_content(choice):
            record = self.record
            if record.last is None:
                record.first = now
            else:
                record.gaps.append(now - record.last)
            record.last = now

    def finish(self, now: float) -> None:
        """The stream ended without ``[DONE]``, which is fine after a finish reason. Raises TenfoldError without one."""
        if not self._finish_reason:
            raise TenfoldError("the stream ended before the answer did")
        self.record.end, self.done = now, True

    def count(self) -> None:
        """Tokens as the usage has them; without it, the prompt's as asked, and one for each chunk with content."""
        record, usage = self.record, self._usage
        output, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        record.has_usage = isinstance(output, int)
        record.output_tokens = output if isinstance(output, int) else record.chunks
        record.prompt_tokens = prompt if isinstance(prompt, int) else record.asked_prompt_tokens
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        record.cached_tokens = cached if isinstance(cached, int) else None


def _has_content(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(name) for name in CONTENT_FIELDS)
    return bool(choice.get("text"))


async def _message(response: httpx.Response) -> str:
    """What an answer that is an error says, in whatever form."""
    said = b""
    async for part in response.aiter_bytes():
        said += part
        if len(said) > ERROR_BYTES:
            break
    try:
        content = json.loads(said)
    except ValueError:
        return said.decode(errors="replace") or response.reason_phrase
    return _error_message(content) if isinstance(content, dict) else str(content)


def _error_message(content: Mapping[str, Any]) -> str:
    error = content.get("error", content)
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or error)
