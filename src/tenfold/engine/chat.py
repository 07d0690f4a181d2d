"""From messages to prompt tokens, through the model's own chat template, and where later prompts are likely to branch.

A breakpoint is a number of tokens. It is found by rendering a shorter conversation, or another one, and counting the
tokens that both prompts begin with: whatever a template drops, trims or adds, what is left is common to both.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tenfold.engine.messages import Mark, plain_messages
from tenfold.engine.ports import Messages
from tenfold.errors import RequestError

PREAMBLES = 64
"""Preambles remembered for each tokenizer."""
WINDOW = 512
"""Characters before the end of a shared text that are tokenized to find the tokens it ends with."""
SETTLED = 16
"""Tokens after which the tokens of a text do not depend on where in a word it was cut off."""

_preambles: WeakKeyDictionary[Any, OrderedDict[tuple[str, str], list[int]]] = WeakKeyDictionary()
_lock = threading.Lock()


class ChatPrompt(NamedTuple):
    """The tokens of a conversation; from ``breakpoints`` in them, later prompts are likely to go on differently."""

    tokens: list[int]
    breakpoints: tuple[int, ...]


def render_chat(tokenizer: Any, messages: Messages) -> ChatPrompt:
    """The prompt of a conversation, ending where the assistant's answer begins.

    ``tokenizer`` is a transformers tokenizer. Messages are dictionaries with ``role`` and ``content``, a string or a
    list of text parts. Breakpoints are the end of what stands before the first message that is not the system's, the
    end of the last message of the user, and what ``cache_control`` marks.

    Raises:
        RequestError: there are no messages, the model has no chat template, or the template rejects them.
    """
    if not messages:
        raise RequestError("messages is empty: send at least one message", "messages")
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("this model has no chat template: use completions instead", "messages")
    plain, marks = plain_messages(messages)
    try:
        text = _render(tokenizer, plain, add_generation_prompt=True)
    except _template_errors() as error:
        raise RequestError(f"the model's chat template rejects the messages: {error}", "messages") from None
    tokens = _encode(tokenizer, text)
    users = [place for place, message in enumerate(plain) if message.get("role") == "user"]
    places = {_preamble_length(tokenizer, plain, tokens)}
    for mark in dict.fromkeys([*marks, *map(Mark, users[-1:])]):
        places.add(_position(tokenizer, plain, mark, text, tokens))
    return ChatPrompt(tokens, tuple(sorted(place for place in places if 0 < place < len(tokens))))


def _position(tokenizer: Any, messages: Messages, mark: Mark, text: str, tokens: list[int]) -> int:
    """Tokens that the prompt shares with the conversation that ends at ``mark``; 0 if there is no such conversation."""
    *before, last = messages[: mark.message + 1]
    if mark.characters is not None:
        last = {**last, "content": last["content"][: mark.characters]}
    try:
        shorter = _render(tokenizer, [*before, last], add_generation_prompt=False)
    except _template_errors():
        return 0
    start = max(0, common_length(shorter, text) - WINDOW)
    if len(text) < 2 * start:
        # To tokenize the ends of both costs less than all of the shorter one, and after a few tokens is the same.
        end = _encode(tokenizer, text[start:])
        shared = common_length(_encode(tokenizer, shorter[start:]), end)
        if shared > SETTLED and end[SETTLED:] == tokens[SETTLED - len(end) :]:
            return len(tokens) - len(end) + shared
    return common_length(_encode(tokenizer, shorter), tokens)


def _preamble_length(tokenizer: Any, messages: Messages, tokens: list[int]) -> int:
    """Tokens before the first message that is not the system's, a template's own additions among them."""
    leading: Messages = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        leading.append(message)
    key = (repr(tokenizer.chat_template), json.dumps(leading, default=repr))
    with _lock:
        known = _preambles.setdefault(tokenizer, OrderedDict())
        preamble = known.get(key)
        if preamble is not None:
            known.move_to_end(key)
    if preamble is None or (shared := common_length(preamble, tokens)) < len(preamble):
        # A template that writes today's date has another preamble tomorrow.
        preamble = _preamble(tokenizer, leading)
        shared = common_length(preamble, tokens)
        with _lock:
            known[key] = preamble
            if len(known) > PREAMBLES:
                known.popitem(last=False)
    return shared


def _preamble(tokenizer: Any, leading: Messages) -> list[int]:
    """What two conversations have in common that differ from the first letter of their users' words."""
    try:
        one, other = (
            _encode(tokenizer, _render(tokenizer, [*leading, {"role": "user", "content": word}], False))
            for word in ("a", "0")
        )
    except _template_errors():
        return []
    return one[: common_length(one, other)]


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the longest common prefix. Compares slices, which is faster by far than item by item."""
    low, high = 0, min(len(one), len(other))
    step = high
    while low < high:
        if one[low : low + step] == other[low : low + step]:
            low += step
        else:
            high = low + step - 1
        step = (high - low + 1) // 2
    return low


def _render(tokenizer: Any, messages: Messages, add_generation_prompt: bool) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _template_errors() -> tuple[type[Exception], ...]:
    from jinja2 import TemplateError

    return TemplateError, TypeError, KeyError, ValueError
