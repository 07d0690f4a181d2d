from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from support.serving import Live, serving


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def post(live: Live) -> Any:
    """A function that posts JSON to a path and returns httpx' response."""

    def send(path: str, body: Any) -> httpx.Response:
        return httpx.post(live.url + path, json=body, timeout=30)

    return send
