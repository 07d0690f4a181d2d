"""The profile: what a viewer needs of it, under preemptions and cancellations, and how it ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.hash_runner import VOCABULARY, HashRunner
from support.serving import make_engine
from tenfold.core import CacheSpec, FinishReason, SamplingParams, Scheduler
from tenfold.engine import profile as module
from tenfold.engine.engine import Engine
from tenfold.engine.profile import PAGE, TRACKS, Profile
from tenfold.engine.service import EngineThread
from tenfold.errors import TenfoldError

PHASES = {"queued", "prefill", "decode"}


class Failing(HashRunner):
    """Fails the steps whose numbers it is given."""

    def __init__(self, *args: Any, steps: tuple[int, ...] = ()) -> None:
        super().__init__(*args)
        self.steps = steps

    def submit(self, plan: Any) -> None:
        if plan.step in self.steps:
            raise RuntimeError("out of order")
        super().submit(plan)

    def reset(self) -> None:
        self.done.clear()


def crowd(path: Path, depth: int = 1, *, slots: int = 2, failing: tuple[int, ...] = (), **options: Any) -> Engine:
    """An engine in a crowded arena that has run samples, beams and cancelled requests to the end."""
    rng = random.Random(depth)
    spec = CacheSpec(block_size=4, num_pages=30, slot_pages=slots)
    scheduler = Scheduler(spec, 16, 6)
    runner = Failing(spec, scheduler.max_sequences, steps=failing)
    profile = Profile(path, **options)
    engine = Engine(scheduler, runner, vocab_size=VOCABULARY, max_context=60, depth=depth, profile=profile)
    for turn in range(60):
        params = SamplingParams(n=rng.choice([1, 1, 3]), max_tokens=rng.randint(1, 30), seed=turn)
        if turn % 10 == 9:
            params = SamplingParams(use_beam_search=True, beam_width=2, n=2, temperature=1.0, max_tokens=6)
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
        ids = engine.submit(prompt, params, cache_salt="a secret")
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if rng.random() < 0.2:
            engine.finish(rng.choice(ids))
    while engine.busy:
        engine.step()
    return engine


def read(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text(encoding="ascii"))
    assert all(event["ph"] in "MXCben" and event["pid"] == 1 and event["name"] for event in events)
    assert all(event["ts"] >= 0 for event in events if event["ph"] != "M")
    return events


def requests_of(events: list[dict[str, Any]]) -> dict[int, list[tuple[str, str]]]:
    """What was begun and ended of each request, in order; times never fall, and what is open ends last in first out."""
    found: dict[int, list[tuple[str, str]]] = defaultdict(list)
    stacks: dict[int, list[str]] = defaultdict(list)
    times: dict[int, float] = defaultdict(float)
    for event in events:
        if event["ph"] not in "ben":
            continue
        assert event["cat"] == "request" and event["ts"] >= times[event["id"]]
        times[event["id"]] = event["ts"]
        stack, name = stacks[event["id"]], event["name"]
        if event["ph"] == "b":
            stack.append(name)
            assert len(stack) <= 2 and (name in PHASES) == (len(stack) == 2)
        elif event["ph"] == "e":
            assert stack.pop() == name
        found[event["id"]].append((event["ph"], name))
    assert not any(stacks.values())
    return found


def spans_of(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The spans of each row, which are in order and do not overlap."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    ends: dict[int, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= ends[event["tid"]] - 1e-3 and event["dur"] >= 0
            ends[event["tid"]] = event["ts"] + event["dur"]
            found[TRACKS[event["tid"]]].append(event)
    return found


@pytest.mark.parametrize(("depth", "slots"), [(1, 2), (2, 2), (3, 0)])
def test_a_crowd(tmp_path: Path, depth: int, slots: int) -> None:
    path = tmp_path / "trace.json"
    engine = crowd(path, depth, slots=slots)
    engine.profile.close()
    events = read(path)
    requests, spans = requests_of(events), spans_of(events)

    ended = Counter(
        event["args"]["finish_reason"] for event in events if event["ph"] == "e" and event["name"] not in PHASES
    )
    assert ended == {reason: count for reason, count in engine.metrics.requests.items() if count}
    assert ended["cancelled"]
    preempted = sum(event["ph"] == "n" for event in events)
    assert 3 < preempted <= engine.scheduler.preemptions
    for each in requests.values():
        begun = [name for kind, name in each if kind == "b" and name in PHASES]
        assert begun[0] == "queued"
        for before, after in pairwise(begun):
            assert after in {"queued": ("prefill",), "prefill": ("decode", "queued"), "decode": ("queued",)}[before]

    steps = spans["runner's steps"]
    assert [step["name"] for step in steps] == [f"step {i}" for i in range(engine.scheduler.step)]
    for step in steps:
        numbers = step["args"]
        assert numbers["tokens"] == numbers["decode_sequences"] + numbers["prefill_tokens"] > 0
        assert 0 <= numbers["free_pages"] <= 30
    assert any(step["args"]["pages_copied"] for step in steps) or not slots
    count = Counter(span["name"] for spans in spans.values() for span in spans)
    assert count["submit"] == count["collect"] == count["commit"] == len(steps) <= count["plan"]

    counters = Counter(event["name"] for event in events if event["ph"] == "C")
    assert counters == dict.fromkeys(["sequences", "pages", "step", *["state slots"] * bool(slots)], len(steps))
    assert "secret" not in path.read_text()


def test_preemptions_are_all_there(tmp_path: Path) -> None:
    spec = CacheSpec(block_size=2, num_pages=12, slot_pages=0)
    scheduler = Scheduler(spec, 8, 4)
    profile = Profile(tmp_path / "trace.json")
    engine = Engine(scheduler, HashRunner(spec, 4), vocab_size=VOCABULARY, max_context=24, profile=profile)
    for i in range(4):
        engine.submit([i, 1, 2], SamplingParams(max_tokens=16, seed=1))
    while engine.busy:
        engine.step()
    profile.close()
    preempted = sum(event["ph"] == "n" for event in read(tmp_path / "trace.json"))
    assert preempted == scheduler.preemptions > 0


def test_steps_that_fail(tmp_path: Path) -> None:
    engine = crowd(tmp_path / "trace.json", 2, failing=(5, 20, 21))
    engine.profile.close()
    events = read(tmp_path / "trace.json")
    requests_of(events)
    assert len(spans_of(events)["runner's steps"]) < engine.scheduler.step - 2
    assert any(event.get("args", {}).get("finish_reason") == "error" for event in events)


def test_without_its_end_it_can_be_read(tmp_path: Path) -> None:
    crowd(tmp_path / "trace.json").profile.close()
    lines = (tmp_path / "trace.json").read_text().rstrip("]\n").split(",\n")
    for kept in (1, 2, 10, len(lines) // 2, len(lines)):
        assert len(json.loads(",\n".join(lines[:kept]) + "]")) == kept


def test_cut_at_any_page_it_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill ends a write at a page of the file, wherever among the events that is."""
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.01)
    engine = crowd(tmp_path / "trace.json")
    engine.profile.close()
    text = (tmp_path / "trace.json").read_bytes()
    counts = [len(json.loads(text[:size] + b"]")) for size in range(PAGE, len(text), PAGE)]
    assert len(counts) > 10 and counts == sorted(set(counts))
    assert len(json.loads(text)) > counts[-1]


def test_a_killed_process_leaves_a_file_that_opens(tmp_path: Path) -> None:
    code = """if True:
        import sys, time
        sys.path.insert(0, sys.argv[2])
        from support.serving import make_engine
        from tenfold.core import SamplingParams
        from tenfold.engine.profile import Profile
        from tenfold.engine.engine import Engine
        from pathlib import Path
        bare, runner = make_engine(seconds=0.01)
        profile = Profile(sys.argv[1])
        engine = Engine(bare.scheduler, runner, vocab_size=bare.vocab_size, max_context=2048, profile=profile)
        engine.submit([1, 2, 3], SamplingParams(max_tokens=2000))
        print("running", flush=True)
        while True:
            engine.step()
    """
    path = tmp_path / "trace.json"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(Path(__file__).parents[1])], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    for _ in range(100):
        if path.stat().st_size > 2000:
            break
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    text = path.read_text()
    assert not text.endswith("]\n")
    assert any(event["name"] == "step 0" for event in json.loads(text + "]"))


def test_it_is_completed_when_the_interpreter_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    code = f"from tenfold.engine.profile import Profile; Profile({str(path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(read(path)) == 1 + 2 * len(TRACKS)


@pytest.mark.parametrize(("limit", "said"), [(20_000, "19.5 KiB"), (5 * PAGE, "20.0 KiB"), (5 * PAGE + 2, "20.0 KiB")])
def test_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: int, said: str
) -> None:
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.002)
    path = tmp_path / "trace.json"
    engine = crowd(path, limit=limit)
    for _ in range(1000):
        engine.profile._file.add({"ph": "C", "pid": 1, "ts": 1.0, "name": "more", "args": {"value": 1}})
    engine.profile.close()
    engine.profile.close()
    assert limit - 1000 < path.stat().st_size <= limit
    assert read(path)
    assert [record.getMessage() for record in caplog.records] == [
        f"the profile {path} has reached its limit of {said} and ends"
    ]
    assert not engine.profile._file._pending, "nothing piles up"
    assert engine.metrics.requests["cancelled"], "the engine went on"


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    profile = Profile(tmp_path / "trace.json")
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    profile._file._file = io.BufferedWriter(io.FileIO(os.open("/dev/full", os.O_WRONLY), "wb"))
    profile.close()
    assert "cannot be written any more and ends" in caplog.records[0].getMessage() and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("path", "limit", "message"),
    [
        ("missing/trace.json", "1MiB", "the profile .*missing/trace.json cannot be written: No such file or directory"),
        (".", "1MiB", "the profile .* cannot be written: Is a directory"),
        ("trace.json", "much", "'much' is not a size"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, path: str, limit: str, message: str) -> None:
    with pytest.raises(TenfoldError, match=message):
        Profile(tmp_path / path, limit)


def test_what_is_live_at_the_end(tmp_path: Path) -> None:
    bare, runner = make_engine()
    profile = Profile(tmp_path / "trace.json")
    engine = Engine(bare.scheduler, runner, vocab_size=bare.vocab_size, max_context=2048, profile=profile)
    engine.submit([1], SamplingParams(max_tokens=50))
    engine.step()
    profile.close()
    events = read(tmp_path / "trace.json")
    assert requests_of(events)[0] == [
        ("b", "request 0"),
        ("b", "queued"),
        ("e", "queued"),
        ("b", "prefill"),
        ("e", "prefill"),
        ("b", "decode"),
        ("e", "decode"),
        ("e", "request 0"),
    ]
    assert events[-1]["args"] == {"finish_reason": "unfinished"}


def test_delivery_and_the_time_of_steps(tmp_path: Path) -> None:
    async def scenario() -> None:
        bare, runner = make_engine(seconds=0.002)
        profile = Profile(tmp_path / "trace.json")
        engine = Engine(bare.scheduler, runner, vocab_size=bare.vocab_size, max_context=2048, profile=profile)
        thread = EngineThread(engine)
        async for _ in await thread.generate([[1], [2]], SamplingParams(max_tokens=9)):
            pass
        thread.stop()
        assert await asyncio.to_thread(thread.join, 5)
        profile.close()

    asyncio.run(scenario())
    spans = spans_of(read(tmp_path / "trace.json"))
    assert {span["name"] for span in spans["event delivery"]} == {"deliver"}
    assert len(spans["event delivery"]) == len(spans["runner's steps"])
    assert all(1999 < step["dur"] < 2001 for step in spans["runner's steps"])


def test_an_engine_without_one_is_as_it_was() -> None:
    engine, runner = make_engine()
    assert "plan" not in vars(engine.scheduler) and "submit" not in vars(runner)
    engine.submit([1], SamplingParams(max_tokens=2))
    assert [event.finish_reason for _ in range(2) for event in engine.step()] == [None, FinishReason.LENGTH]
