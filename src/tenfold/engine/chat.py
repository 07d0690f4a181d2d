"""From messages to prompt tokens, through the model's own chat template."""

from __future__ import annotations

from typing import Any

from tenfold.engine.ports import Messages
from tenfold.errors import RequestError


def render_chat(tokenizer: Any, messages: Messages) -> list[int]:
    """Prompt token ids of a conversation, ending where the assistant's answer begins.

    ``tokenizer`` is a transformers tokenizer. Messages are dictionaries with ``role`` and string ``content``.

    Raises:
        RequestError: there are no messages, the model has no chat template, or the template rejects them.
    """
    if not messages:
        raise RequestError("messages is empty: send at least one message", "messages")
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("this model has no chat template: use completions instead", "messages")
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise RequestError(f"the model's chat template rejects the messages: {error}", "messages") from None
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
