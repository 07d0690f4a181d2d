"""A tokenizer that fits in the head: a token is a byte, two more are special; its chat template is a real one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

END, START = 256, 257
SPECIAL = {END: "<end>", START: "<start>"}
VOCABULARY = 258

TEMPLATE = """{% for message in messages %}\
{% if message.role == 'tool' %}{{ raise_exception('tools have no place in this template') }}{% endif %}\
{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@cache
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment()
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


class ByteTokenizer:
    def __init__(self, chat_template: str | None = TEMPLATE) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return ([START] if add_special_tokens else []) + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        data = bytearray()
        for token in token_ids:
            if token < 256:
                data.append(token)
            elif not skip_special_tokens:
                data += SPECIAL[token].encode()
        return data.decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        if token >= 256:
            return SPECIAL[token]
        return f"<0x{token:02X}>"

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        template = _compiled(self.chat_template or "")
        return template.render(messages=messages, add_generation_prompt=add_generation_prompt)
