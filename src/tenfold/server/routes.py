"""The endpoints: each reads a body, checks it, and hands the work on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from tenfold.errors import RequestError
from tenfold.server.answer import Answer, while_connected
from tenfold.server.body import read_json
from tenfold.server.forms import ChatForm, CompletionForm
from tenfold.server.metrics import CONTENT_TYPE
from tenfold.server.prompts import chat_prompt, completion_prompts, encode
from tenfold.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tenfold.server.state import Serving, Status

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 once requests are answered, 503 while the model loads, on the way down and after a failure."""
    status = _serving(request).status
    return JSONResponse({"status": status.value}, 200 if status is Status.READY else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The engine's counters for Prometheus."""
    found = _serving(request).metrics
    assert found is not None, "the gate lets no request in before"
    return Response(await found.render(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    serving = _serving(request)
    return JSONResponse({"object": "list", "data": [_model(serving, name) for name in serving.names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> JSONResponse:
    serving = _serving(request)
    serving.require_model(name)
    return JSONResponse(_model(serving, name))


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    serving = _serving(request)
    body = ChatRequest.parse(await read_json(request, serving.settings.max_body_bytes))
    serving.require_model(body.model)
    params, salt = body.params(), _salt(request, body.cache_salt)

    async def begin() -> Answer:
        prompt = await asyncio.to_thread(chat_prompt, serving.tokenizer, body.messages)
        form = ChatForm(body.model, params.logprobs)
        with body.spelling():
            return await Answer.begin(
                serving, [prompt.tokens], params, form, cache_salt=salt, breakpoints=[prompt.breakpoints]
            )

    return await _answer(request, begin, body.stream, body.include_usage)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    serving = _serving(request)
    body = CompletionRequest.parse(await read_json(request, serving.settings.max_body_bytes))
    serving.require_model(body.model)
    params, salt = body.params(), _salt(request, body.cache_salt)

    async def begin() -> Answer:
        limit = serving.settings.max_prompts
        prompts = await asyncio.to_thread(completion_prompts, serving.tokenizer, body.prompt, limit)
        form = CompletionForm(body.model, params.logprobs)
        return await Answer.begin(serving, prompts, params, form, cache_salt=salt)

    return await _answer(request, begin, body.stream, body.include_usage)


@router.post("/v1/tokenize")
async def tokenize(request: Request) -> JSONResponse:
    """Token ids of a text or of a conversation."""
    serving = _serving(request)
    body = TokenizeRequest.parse(await read_json(request, serving.settings.max_body_bytes))
    serving.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt, a string, or messages", "prompt")
    if body.messages is not None:
        tokens = (await asyncio.to_thread(chat_prompt, serving.tokenizer, body.messages)).tokens
    else:
        special = body.add_special_tokens
        tokens = await asyncio.to_thread(encode, serving.tokenizer, body.prompt or "", add_special_tokens=special)
    return JSONResponse({"count": len(tokens), "max_model_len": serving.engine.max_context, "tokens": tokens})


@router.post("/v1/detokenize")
async def detokenize(request: Request) -> JSONResponse:
    """The text of token ids, special tokens included."""
    serving = _serving(request)
    body = DetokenizeRequest.parse(await read_json(request, serving.settings.max_body_bytes))
    serving.require_model(body.model)
    last = serving.engine.vocab_size - 1
    wrong = next((token for token in body.tokens if not 0 <= token <= last), None)
    if wrong is not None:
        raise RequestError(f"token id {wrong} is not in the vocabulary: ids are 0 to {last}", "tokens")
    text = await asyncio.to_thread(serving.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text})


async def _answer(
    request: Request, begin: Callable[[], Awaitable[Answer]], stream: bool, include_usage: bool
) -> Response:
    if stream:
        answer = await while_connected(request, begin())
        return answer.stream(include_usage)

    async def whole() -> Response:
        return await (await begin()).whole()

    return await while_connected(request, whole())


def _model(serving: Serving, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": serving.created, "owned_by": "tenfold"}


def _salt(request: Request, sent: str) -> str:
    """What a request's prefixes are shared under: holders of different keys share nothing, whatever salt they send."""
    tenant: str = getattr(request.state, "tenant", "")
    return tenant + sent


def _serving(request: Request) -> Serving:
    serving: Serving = request.app.state.tenfold
    return serving
