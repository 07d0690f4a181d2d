"""The Python interface: shapes of results, errors, interruption, failing steps."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from support.checkpoints import make_checkpoint
from support.programs import needs_compiler
from tenfold import LLM, SamplingParams
from tenfold.errors import EngineError, ModelError, RequestError, TenfoldError
from tenfold.models.hub import DEFAULT_MODEL

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> LLM:
    return LLM(make_checkpoint("llama", tmp_path_factory.mktemp("llama")), memory="1MiB", progress=False)


@pytest.fixture(scope="module")
def real() -> LLM:
    return LLM(DEFAULT_MODEL, memory="128MiB", progress=False)


@needs_compiler
def test_keys_and_values_as_bytes_fit_nearly_twice_the_tokens(real) -> None:
    """The same text from half the memory, with sharing, forks and preemption as ever."""
    small = LLM(DEFAULT_MODEL, memory="24MiB", kv_cache_dtype="int8", progress=False)
    per_token = {llm: llm.engine.scheduler.spec.page_bytes for llm in (real, small)}
    assert per_token[real] / per_token[small] == pytest.approx(2 * 64 / (64 + 4))
    prompts = ["The capital of France is", "Water boils at 100 degrees", "The sun rises in the"] * 4
    params = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
    texts = [output.outputs[0].token_ids for output in small.generate(prompts, params, use_tqdm=False)]
    assert small.stats()["preemptions"] > 0
    assert small.tokenizer.decode(texts[0]).startswith(" Paris.")
    alone = [small.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts[:3]]
    assert [text[:8] for text in texts] == [text[:8] for text in alone * 4]


def test_strings_token_ids_and_chats(real) -> None:
    text = "The capital of France is"
    tokens = real.tokenizer.encode(text)
    by_text, by_tokens = real.generate([text, tokens], GREEDY, use_tqdm=False)
    assert by_text.prompt == text and by_tokens.prompt is None
    assert by_text.prompt_token_ids == by_tokens.prompt_token_ids == tokens
    assert by_text.outputs[0].text == by_tokens.outputs[0].text == real.tokenizer.decode(by_text.outputs[0].token_ids)
    assert real.generate(text, GREEDY, use_tqdm=False)[0].outputs == by_text.outputs
    chat = real.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY, use_tqdm=False)
    assert "Paris" in chat[0].outputs[0].text
    assert chat[0].outputs[0].finish_reason == "stop"
    assert chat[0].outputs[0].token_ids[-1] in real.loaded.eos_token_ids
    assert "<|im_end|>" not in chat[0].outputs[0].text


def test_results_keep_the_order_of_the_prompts(real) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    results = real.generate(["One", "Two", "Three"], params, use_tqdm=False)
    assert [result.prompt for result in results] == ["One", "Two", "Three"]
    assert [len(result.outputs[0].token_ids) for result in results] == [9, 1, 5]


def test_a_stop_string_is_cut_out(real) -> None:
    prompt = "Count: one two three four"
    plain = real.generate(prompt, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0].outputs[0].text
    stop = plain[7:12]
    cut = real.generate(prompt, SamplingParams(temperature=0, max_tokens=24, stop=stop), use_tqdm=False)[0].outputs[0]
    assert cut.text == plain[: plain.index(stop)] and cut.finish_reason == "stop"
    with_stop = SamplingParams(temperature=0, max_tokens=24, stop=[stop], include_stop_str_in_output=True)
    assert real.generate(prompt, with_stop, use_tqdm=False)[0].outputs[0].text == cut.text + stop


def test_emoji_and_scripts_survive_streaming(real) -> None:
    from tenfold.engine.text import Detokenizer

    text = "naïve café — 東京 🙂👩‍👩‍👧 العربية देवनागरी \N{REPLACEMENT CHARACTER} end"
    tokens = real.tokenizer.encode(text)
    stream = Detokenizer(real.tokenizer)
    pieces = [stream.push(token) for token in tokens] + [stream.flush()]
    assert "".join(pieces) == text
    assert sum(piece.count("\N{REPLACEMENT CHARACTER}") for piece in pieces) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ([5, 211], GREEDY, "211"),
        ([-1], GREEDY, "-1"),
        ([5] * 2000, GREEDY, "2000 tokens"),
        ([5], SamplingParams(max_tokens=5000), "max_tokens"),
        ([5], SamplingParams(logit_bias={999: 1.0}), "999"),
        ([5], SamplingParams(stop_token_ids=[999]), "999"),
    ],
)
def test_bad_prompts_are_refused_before_anything_starts(tiny, prompt, params, message) -> None:
    with pytest.raises(RequestError, match=message):
        tiny.generate([[5, 6], prompt], [GREEDY, params], use_tqdm=False)
    assert not tiny.engine.busy


def test_what_can_never_fit_says_how_many_blocks(tmp_path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    page = LLM(folder, memory="1MiB", progress=False).stats()["page_bytes"]
    llm = LLM(folder, memory=10 * page, progress=False)
    with pytest.raises(RequestError, match=r"need 13 blocks of 16 tokens; the arena has 10 pages"):
        llm.generate([[5] * 100], SamplingParams(max_tokens=100), use_tqdm=False)
    assert len(llm.generate([[5] * 100], SamplingParams(max_tokens=None), use_tqdm=False)[0].outputs[0].token_ids) <= 61


def test_counts_of_prompts_and_parameters_must_agree(tiny) -> None:
    with pytest.raises(RequestError, match="2 prompts and 3 parameters"):
        tiny.generate([[5], [6]], [GREEDY] * 3, use_tqdm=False)


def test_text_needs_a_tokenizer_and_token_ids_do_not(tiny) -> None:
    assert len(tiny.generate([[5]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) > 0
    with pytest.raises(ModelError, match="tokenizer"):
        tiny.generate("hello", GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "lots"},
        {"memory": "10B"},
        {"block_size": 0},
        {"depth": 9},
        {"device": "abacus"},
        {"max_batch_tokens": 0},
        {"quantize": "int3"},
        {"quantize": "int8", "kernels": "reference"},
        {"kv_cache_dtype": "int2"},
        {"kv_cache_dtype": "int8", "kernels": "reference"},
    ],
    ids=str,
)
def test_bad_options_are_one_line(tmp_path_factory, options) -> None:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    with pytest.raises(TenfoldError) as caught:
        LLM(folder, progress=False, **options)
    assert "\n" not in str(caught.value)


def test_ctrl_c_leaves_the_object_usable(tiny) -> None:
    expected = tiny.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):
            tiny.generate([[5, 6], [7]], endless, use_tqdm=False)
    assert not tiny.engine.busy
    assert tiny.stats()["blocks"]["referenced"] == 0
    assert tiny.generate([[5, 6, 7]], GREEDY, use_tqdm=False) == expected


def test_a_failing_step_ends_its_requests_and_no_others(tiny, monkeypatch) -> None:
    expected = tiny.generate([[5, 6, 7]], GREEDY, use_tqdm=False)

    def fail(*_):
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine.runner.sampler, "sample", fail)
        with pytest.raises(EngineError):
            tiny.generate([[5, 6, 7], [8]], GREEDY, use_tqdm=False)
    assert not tiny.engine.busy
    assert tiny.stats()["blocks"]["referenced"] == 0
    assert tiny.stats()["requests"]["error"] > 0
    assert tiny.generate([[5, 6, 7]], GREEDY, use_tqdm=False) == expected
