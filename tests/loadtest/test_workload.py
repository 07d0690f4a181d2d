from __future__ import annotations

import json
import math
import random
from array import array
from itertools import pairwise
from pathlib import Path

import pytest

from tenfold.errors import TenfoldError
from tenfold.loadtest.workload import (
    Prompt,
    PromptKind,
    Request,
    Span,
    TooLong,
    Workload,
    due_times,
    made_up,
    read_workload,
    warm_up,
)

IDS = Span(1000, 1999)


def written(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def lengths(workload: Workload) -> list[tuple[int, int, float | None]]:
    return [(each.prompt.tokens, each.output_tokens, each.arrival) for each in workload.requests]


def jsonl(*entries: dict[str, object]) -> str:
    return "\n".join(json.dumps(entry) for entry in entries) + "\n"


def test_spans() -> None:
    assert Span.parse("512", "--x") == (512, 512)
    assert Span.parse("32:1024", "--x") == (32, 1024)
    assert Span.parse("0:9", "--x", least=0) == (0, 9)
    for wrong in ("", "x", "0", "5:4", "1:", ":1", "1:2:3", "-1", "1.5"):
        with pytest.raises(TenfoldError, match=r"--x .*: write a number such as 512"):
            Span.parse(wrong, "--x")


def test_as_many_prompts_from_each_doubling() -> None:
    source, span = random.Random(0), Span(32, 1023)
    drawn = [span.log_uniform(source) for _ in range(5000)]
    assert min(drawn) >= 32 and max(drawn) <= 1023
    doublings = [sum(32 * 2**k <= each < 64 * 2**k for each in drawn) for k in range(5)]
    assert max(doublings) < 1.2 * min(doublings)
    assert {Span(3, 4).log_uniform(source) for _ in range(50)} == {3, 4}
    assert Span(7, 7).log_uniform(source) == 7


def test_made_up_requests() -> None:
    workload = made_up(20, Span(5, 50), Span(2, 9), shared_prefix=8, seed=1)
    prompts = [each.prompt.as_token_ids(IDS) for each in workload.requests]
    assert [len(prompt) for prompt in prompts] == [each.prompt.tokens for each in workload.requests]
    assert all(13 <= len(prompt) <= 58 for prompt in prompts)
    assert all(2 <= each.output_tokens <= 9 for each in workload.requests)
    assert all(1000 <= token <= 1999 for prompt in prompts for token in prompt)
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert len({tuple(prompt[8:13]) for prompt in prompts}) == 20
    texts = [each.prompt.as_text() for each in workload.requests]
    assert [len(text.split()) for text in texts] == [len(prompt) for prompt in prompts]
    again = made_up(20, Span(5, 50), Span(2, 9), shared_prefix=8, seed=1)
    assert [each.prompt.as_token_ids(IDS) for each in again.requests] == prompts
    other = made_up(20, Span(5, 50), Span(2, 9), shared_prefix=8, seed=2)
    assert other.requests[0].prompt.as_token_ids(IDS)[:8] != prompts[0][:8]


def test_warm_up_asks_something_else() -> None:
    workload = made_up(3, Span(30, 40), Span(2, 9))
    warm = warm_up(workload, 5)
    assert [each.prompt.tokens for each in warm[:3]] == [each.prompt.tokens for each in workload.requests]
    asked = {tuple(each.prompt.as_token_ids(IDS)[:10]) for each in (*warm, *workload.requests)}
    assert len(asked) == 8


def test_when_requests_are_due(tmp_path: Path) -> None:
    workload = made_up(4000, Span(1, 1), Span(1, 1))
    assert due_times(workload) == [0.0] * 4000
    due = due_times(workload, rate=8.0, seed=3)
    assert due == sorted(due) and due == due_times(workload, rate=8.0, seed=3)
    assert 4000 / due[-1] == pytest.approx(8.0, rel=0.05)
    gaps = [after - before for before, after in pairwise(due)]
    assert sum(gap > 1 / 8 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.1), "exponential"
    trace = read_workload(written(tmp_path, "t.csv", "req_time,prompt_len,output_len\n7,1,1\n5,2,1\n"))
    assert due_times(trace, trace_speed=4.0) == [0.0, 0.5]
    assert lengths(trace)[0] == (2, 1, 5.0), "in order of arrival"
    with pytest.raises(TenfoldError, match="does not say when its requests arrive: leave out --trace-speed"):
        due_times(workload, trace_speed=1.0)


def test_a_json_workload(tmp_path: Path) -> None:
    requests = [
        {"id": 0, "prompt_token_ids": [5, 6, 7], "text": "a b c", "prompt_len": 3, "output_len": 4},
        {"id": 1, "prompt_token_ids": [8], "output_len": 2},
    ]
    workload = read_workload(written(tmp_path, "w.json", json.dumps({"requests": requests})))
    assert lengths(workload) == [(3, 4, None), (1, 2, None)]
    assert workload.requests[0].prompt.as_token_ids(IDS) == [5, 6, 7]
    assert workload.requests[0].prompt.as_text() == "a b c"
    with pytest.raises(TenfoldError, match="token ids without a text"):
        workload.requests[1].prompt.require(PromptKind.TEXT)
    workload.requests[1].prompt.require(PromptKind.TOKENS)


def test_azure_and_vtc(tmp_path: Path) -> None:
    azure = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.48,34,8\n"
    )
    workload = read_workload(written(tmp_path, "azure.csv", azure))
    assert [(prompt, output) for prompt, output, _ in lengths(workload)] == [(4808, 10), (34, 8)]
    assert due_times(workload, trace_speed=1.0) == pytest.approx([0.0, 0.50004], abs=1e-5)
    vtc = "req_time,client,prompt_len,output_len\r\n0.0,a,13,199\r\n0.25,b,36,137\r\n\r\n"
    workload = read_workload(written(tmp_path, "vtc.csv", vtc))
    assert lengths(workload) == [(13, 199, 0.0), (36, 137, 0.25)]
    assert len(workload.requests[1].prompt.as_token_ids(IDS)) == 36
    plain = read_workload(written(tmp_path, "lengths.csv", "num_prefill_tokens,num_decode_tokens\n5,6\n"))
    assert lengths(plain) == [(5, 6, None)]


def test_mooncake_prompts_share_what_their_hash_ids_share(tmp_path: Path) -> None:
    entries = [
        {"timestamp": 1500, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 2000, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 3]},
        {"timestamp": 2500, "input_length": 600, "output_length": 6, "hash_ids": [4]},
        {"timestamp": 2500, "input_length": 600, "output_length": 6, "hash_ids": [4, 5, 6]},
    ]
    workload = read_workload(written(tmp_path, "m.jsonl", jsonl(*entries)))
    assert due_times(workload, trace_speed=0.5) == [0.0, 1.0, 2.0, 2.0]
    first, second, third, fourth = (each.prompt.as_token_ids(IDS) for each in workload.requests)
    assert [len(each) for each in (first, second, third, fourth)] == [1030, 1100, 600, 600]
    assert first[:1024] == second[:1024] and first[:512] != first[512:1024]
    assert first[1024:] != second[1024:1030]
    assert third[:512] == fourth[:512] and third[512:] != fourth[512:], "tokens without a hash are a prompt's own"


def test_recorded_tokens(tmp_path: Path) -> None:
    entry = {"input_toks": 2, "output_toks": 3, "arrival_time_ns": 46_926_808, "input_tok_ids": [9, 8]}
    workload = read_workload(written(tmp_path, "s.jsonl", jsonl(entry | {"output_tok_ids": [1, 2, 3]}) + "\n"))
    assert lengths(workload) == [(2, 3, 0.046926808)]
    assert workload.requests[0].prompt.as_token_ids(IDS) == [9, 8]


CSV = "prompt_len,output_len\n"


def test_what_is_too_long_is_skipped_or_clipped_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path, "t.csv", CSV + "100,50\n60,40\n10,200\n0,5\n5,0\n")
    skipped = read_workload(path, max_context=100)
    assert lengths(skipped) == [(60, 40, None)]
    assert (skipped.skipped, skipped.clipped) == ({"too long": 2, "without tokens": 2}, 0)
    clipped = read_workload(path, max_context=100, too_long=TooLong.CLIP)
    assert lengths(clipped) == [(50, 50, None), (60, 40, None), (1, 99, None)]
    assert (clipped.skipped, clipped.clipped) == ({"without tokens": 2}, 2)
    assert len(clipped.requests[0].prompt.as_token_ids(IDS)) == 50
    assert lengths(read_workload(path, limit=1, max_context=100)) == [(60, 40, None)]
    with pytest.raises(TenfoldError, match=r"t\.csv has no requests to send: 3 too long, 2 without tokens"):
        read_workload(path, max_context=10)


def test_clipped_prompts() -> None:
    parts = Prompt(10, (("a", 4), ("b", 4), ("c", 2)))
    assert parts.clipped(6).as_token_ids(IDS) == parts.as_token_ids(IDS)[:6]
    given = Prompt(4, token_ids=array("I", [1, 2, 3, 4]), text="abcdefgh").clipped(2)
    assert (given.tokens, given.as_token_ids(IDS), given.as_text()) == (2, [1, 2], "abcd")


def test_traces_cost_little_memory(tmp_path: Path) -> None:
    path = written(tmp_path, "t.csv", CSV + "1000000,1\n" * 1000)
    assert sum(each.prompt.tokens for each in read_workload(path).requests) == 10**9


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.txt", "", "w.txt is no workload: its name must end with .json, .jsonl, .csv"),
        ("w.json", "[]", "w.json must be an object with a list of requests"),
        ("w.json", '{"requests":\n [}', "w.json line 2: Expecting value at column 3"),
        ("w.json", '{"requests": [3]}', "w.json requests[0]: must be an object, not 3"),
        ("w.json", '{"requests": [{"output_len": 1}]}', "requests[0]: prompt_token_ids must be a list of token ids"),
        ("w.json", '{"requests": [{"prompt_token_ids": [-1], "output_len": 1}]}', "must be a list of token ids"),
        ("w.json", '{"requests": [{"prompt_token_ids": [1]}]}', "output_len must be a number of tokens, not null"),
        ("w.json", '{"requests": [{"prompt_token_ids": [1], "output_len": true}]}', "a number of tokens, not true"),
        ("w.json", '{"requests": [{"prompt_token_ids": [1], "text": 1, "output_len": 1}]}', "text must be a string"),
        ("w.json", '{"requests": []}', "w.json has no requests to send"),
        ("w.jsonl", "\n", "w.jsonl has no requests to send"),
        ("w.jsonl", '\n{"a": }\n', "w.jsonl line 2: Expecting value at column 7"),
        ("w.jsonl", "\n[1]\n", "w.jsonl line 2: must be an object, not a list"),
        ("w.jsonl", '{"x": 1}\n', "w.jsonl line 1: neither hash_ids (Mooncake) nor input_tok_ids"),
        ("w.jsonl", '{"hash_ids": 1, "input_length": 2}\n', "w.jsonl line 1: hash_ids must be a list, not 1"),
        (
            "w.jsonl",
            '{"hash_ids": [], "input_length": -2}\n',
            "input_length must be a number of tokens, not -2",
        ),
        (
            "w.jsonl",
            '{"hash_ids": [], "input_length": 2, "output_length": 2, "timestamp": "soon"}\n',
            'line 1: timestamp must be a number or a date and a time, not "soon"',
        ),
        ("w.csv", "", "w.csv line 1: no column is named contexttokens or prompt_len"),
        ("w.csv", "prompt_len\n1\n", "w.csv line 1: no column is named generatedtokens or output_len"),
        ("w.csv", CSV + "1,2\n1\n", "w.csv line 3: 1 columns where the first line has 2"),
        ("w.csv", CSV + "1,2\n1,x\n", 'w.csv line 3: output_len must be a number of tokens, not "x"'),
        ("w.csv", CSV + '"1\n', "w.csv line 2: unexpected end of data"),
        ("w.csv", "timestamp,prompt_len,output_len\nnan,1,1\n", "line 2: timestamp must be a number or a date"),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(TenfoldError) as raised:
        read_workload(path)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TenfoldError, match=r"cannot read .*none\.csv: No such file"):
        read_workload(tmp_path / "none.csv")
    (tmp_path / "w.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(TenfoldError, match=r"w\.csv is not UTF-8 text"):
        read_workload(tmp_path / "w.csv")
    for name in ("w.json", "w.jsonl"):
        (tmp_path / name).write_bytes(b"\xff\n")
        with pytest.raises(TenfoldError, match="is not UTF-8 text"):
            read_workload(tmp_path / name)


def test_a_request_is_small() -> None:
    assert not hasattr(Request(Prompt(1), 1), "__dict__")
