"""From what a client sends to prompt tokens. Blocking where texts are long: called on a thread."""

from __future__ import annotations

from typing import Any

from tenfold.engine.chat import ChatPrompt, render_chat
from tenfold.engine.ports import Messages
from tenfold.errors import RequestError, shortened

ROLES = ("system", "developer", "user", "assistant", "tool")
NULLABLE = frozenset({"refusal", "audio", "annotations", "function_call", "tool_calls"})
"""Fields of an answer that a client sends back as part of the conversation; only empty ones are accepted."""


def chat_messages(sent: list[Any]) -> Messages:
    """The conversation for ``render_chat``: known roles, and contents that are strings or lists.

    ``developer`` is OpenAI's newer name of ``system``, which is what templates know.

    Raises:
        RequestError: something in it is not supported; ``param`` names it.
    """
    messages: Messages = []
    for place, message in enumerate(sent):
        at = f"messages[{place}]"
        if not isinstance(message, dict):
            raise RequestError(f"{at} must be an object, not {shortened(message)}", at)
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(
                f"{at}.role must be one of {', '.join(ROLES)}, not {shortened(role)}", f"{at}.role", "invalid_value"
            )
        kept: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": ""}
        for name, value in message.items():
            if name in ("role", "content") or (name in NULLABLE and not value):
                continue
            if name == "cache_control":
                kept[name] = value
                continue
            if name != "name" and not (name == "tool_call_id" and role == "tool"):
                where = f"{at}.{name[:80]}"
                raise RequestError(f"{where} is not supported: leave it out", where, "unsupported_parameter")
            if value is not None:
                kept[name] = _string(value, f"{at}.{name}")
        kept["content"] = _content(message.get("content"), f"{at}.content")
        messages.append(kept)
    return messages


def chat_prompt(tokenizer: Any, sent: list[Any]) -> ChatPrompt:
    """The prompt of a conversation. Raises RequestError as ``chat_messages`` and ``render_chat``."""
    return render_chat(tokenizer, chat_messages(sent))


def completion_prompts(tokenizer: Any, sent: Any, limit: int) -> list[list[int]]:
    """Token ids of each prompt in ``sent``: a string, strings, token ids or lists of token ids.

    Raises:
        RequestError: it is none of these, or more than ``limit`` prompts.
    """
    if isinstance(sent, str):
        return [encode(tokenizer, sent)]
    if not isinstance(sent, list) or not sent:
        raise _no_prompt()
    if isinstance(sent[0], int):
        return [sent]  # the engine checks the ids
    if len(sent) > limit:
        raise RequestError(f"prompt holds {len(sent)} prompts: send at most {limit} at once", "prompt")
    if all(isinstance(prompt, str) for prompt in sent):
        return [encode(tokenizer, prompt) for prompt in sent]
    if all(isinstance(prompt, list) for prompt in sent):
        return sent
    raise _no_prompt()


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens)]


def _no_prompt() -> RequestError:
    return RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
        "prompt",
        "invalid_type",
    )


def _content(value: Any, at: str) -> str | list[Any]:
    if value is None:
        raise RequestError(f"{at} is required", at, "missing_required_parameter")
    if not isinstance(value, str | list):
        raise RequestError(f"{at} must be a string or a list of text parts, not {shortened(value)}", at, "invalid_type")
    return value


def _string(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{at} must be a string, not {shortened(value)}", at, "invalid_type")
    return value
