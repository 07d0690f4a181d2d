"""Where in a prompt later ones are likely to branch off: for real templates, by comparing with what they render."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from support.byte_tokenizer import ByteTokenizer
from tenfold.engine import chat
from tenfold.engine.chat import common_length, render_chat
from tenfold.engine.messages import MAX_MARKS
from tenfold.errors import RequestError

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA3 = """{{ '<|begin_of_text|>' }}{% for message in messages %}\
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
REASONING = """{% set ns = namespace(last=-1) %}{% for message in messages %}\
{% if message['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{% for message in messages %}{% set content = message['content'] %}\
{% if message['role'] == 'assistant' and loop.index0 < ns.last %}{% set content = content.split('</think>')[-1] %}\
{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
NO_SYSTEM = """{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}""" + CHATML
ALTERNATING = (
    """{% if messages[-1]['role'] != 'user' %}{{ raise_exception('the user comes last') }}{% endif %}""" + LLAMA3
)
EPHEMERAL = {"type": "ephemeral"}


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def cut(template: str, messages: list[dict[str, Any]]) -> list[str]:
    """The prompt as text, cut at its breakpoints."""
    tokens, breakpoints = render_chat(ByteTokenizer(template), messages)
    edges = [0, *breakpoints, len(tokens)]
    return [bytes(tokens[start:end]).decode() for start, end in pairwise(edges)]


def test_a_default_preamble_and_the_last_user() -> None:
    messages = [say("user", "one"), say("assistant", "two"), say("user", "three")]
    assert cut(CHATML, messages) == [
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n",
        "one<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n",
        "<|im_start|>assistant\n",
    ]


def test_a_system_message_and_an_answer_to_go_on_with() -> None:
    messages = [say("system", "be brief"), say("user", " one "), say("assistant", "two")]
    assert cut(LLAMA3, messages) == [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "one<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\ntwo<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ]


def test_reasoning_that_is_dropped_later() -> None:
    """The next turn's prompt goes on from the last user's message, not from the answer with its reasoning."""
    first = [say("user", "one")]
    second = [*first, say("assistant", "<think>\nhm</think>two"), say("user", "three")]
    tokenizer = ByteTokenizer(REASONING)
    before, after = render_chat(tokenizer, first), render_chat(tokenizer, second)
    end = before.breakpoints[-1]
    assert after.tokens[:end] == before.tokens[:end]
    assert bytes(before.tokens[:end]).decode() == "<|im_start|>user\none<|im_end|>\n"
    assert "hm" not in bytes(after.tokens).decode()
    marked = [first[0], say("assistant", "<think>\nhm</think>two", cache_control=EPHEMERAL), say("user", "three")]
    shared = bytes(after.tokens[: render_chat(tokenizer, marked).breakpoints[1]]).decode()
    assert shared.endswith("assistant\n"), "as much as a conversation that ends there has in common"


def test_templates_that_refuse_the_shorter_conversation() -> None:
    messages = [say("user", "one", cache_control=EPHEMERAL), say("assistant", "two", cache_control=EPHEMERAL)]
    whole = cut(ALTERNATING, [*messages, say("user", "three")])
    assert [text.rpartition("\n")[2] for text in whole] == ["", "one<|eot_id|>", "three<|eot_id|>", ""]
    assert len(whole) == 4, "no breakpoint after the answer: the template rejects a conversation that ends there"
    with pytest.raises(RequestError, match="no system"):
        render_chat(ByteTokenizer(NO_SYSTEM), [say("system", "x"), say("user", "y")])


def test_marks() -> None:
    document = [part("the document. ", cache_control=EPHEMERAL), part("the question")]
    messages = [say("system", "s", cache_control=EPHEMERAL), say("user", document), say("assistant", "two")]
    prompt = cut(CHATML, messages)
    assert prompt[:4] == [
        "<|im_start|>system\ns<|im_end|>\n",
        "<|im_start|>user\n",
        "the document. ",
        "the question<|im_end|>\n",
    ]
    plain = [say("system", "s"), say("user", "the document. the question"), say("assistant", "two")]
    assert "".join(prompt) == "".join(cut(CHATML, plain)), "a mark changes nothing else"
    whole = [say("user", [part("x"), part("y", cache_control=EPHEMERAL)], cache_control=EPHEMERAL)]
    assert cut(CHATML, whole) == cut(CHATML, [say("user", "xy")]), "marks at one place are one"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (say("user", "x", cache_control={"type": "persistent"}), "messages[0].cache_control.type"),
        (say("user", "x", cache_control={}), "messages[0].cache_control.type"),
        (say("user", "x", cache_control="ephemeral"), "messages[0].cache_control"),
        (say("user", "x", cache_control=EPHEMERAL | {"ttl": "1h"}), "messages[0].cache_control.ttl"),
        (say("user", [part("x", cache_control={"type": 7})]), "messages[0].content[0].cache_control.type"),
        (say("user", [part("x", detail="low")]), "messages[0].content[0].detail"),
        (say("user", [part("x"), {"type": "image_url"}]), "messages[0].content[1]"),
        (say("user", [part("x", cache_control=EPHEMERAL)] * (MAX_MARKS + 1)), "messages"),
        ("hello", "messages[0]"),
    ],
)
def test_refused_by_name(message: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        render_chat(ByteTokenizer(CHATML), [message])
    assert caught.value.param == param and param.rpartition(".")[2] in str(caught.value)


def test_a_preamble_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ByteTokenizer(CHATML)
    rendered: list[bool] = []
    render = tokenizer.apply_chat_template

    def counted(messages: Any, **options: Any) -> str:
        rendered.append(options["add_generation_prompt"])
        return render(messages, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    for turn in range(5):
        render_chat(tokenizer, [say("user", f"{turn}")])
    assert rendered.count(True) == 5 and rendered.count(False) == 5 + 2
    for text in range(chat.PREAMBLES + 9):
        render_chat(tokenizer, [say("system", f"{text}"), say("user", "x")])
    assert len(chat._preambles[tokenizer]) == chat.PREAMBLES


def test_a_preamble_that_changes() -> None:
    tokenizer = ByteTokenizer(CHATML)
    first = render_chat(tokenizer, [say("user", "x")]).breakpoints[0]
    apply, today = tokenizer.apply_chat_template, "Monday "
    tokenizer.apply_chat_template = lambda *a, **k: today + apply(*a, **k)  # type: ignore[method-assign]
    assert render_chat(tokenizer, [say("user", "x")]).breakpoints[0] == first + len("Monday ")
    today = "Tuesday "
    assert render_chat(tokenizer, [say("user", "x")]).breakpoints[0] == first + len("Tuesday ")


def test_the_length_in_common() -> None:
    rng = random.Random(0)
    for _ in range(500):
        one = [rng.randrange(2) for _ in range(rng.randrange(40))]
        other = [*one[: rng.randrange(41)], *(rng.randrange(2) for _ in range(rng.randrange(10)))]
        expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        assert common_length(one, other) == (min(len(one), len(other)) if expected is None else expected)
