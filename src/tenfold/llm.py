"""Tenfold from Python: ``LLM`` runs prompts and returns texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tenfold.assembly import assemble
from tenfold.core import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from tenfold.engine.chat import render_chat
from tenfold.engine.interrupt import deferred_interrupt
from tenfold.engine.ports import Messages
from tenfold.engine.ranking import Score, best
from tenfold.engine.text import TextStream
from tenfold.errors import EngineError, RequestError
from tenfold.models.hub import DEFAULT_MODEL

Prompt = str | Sequence[int]


@dataclass
class CompletionOutput:
    """One generated text.

    ``token_ids`` includes the token that ended it, ``text`` does not. ``finish_reason`` is ``"stop"`` or ``"length"``.
    ``logprobs`` has an entry per token where ``SamplingParams.logprobs`` asked for them; ``score`` is that of a beam
    search.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    score: float | None = None


@dataclass
class RequestOutput:
    """What became of one prompt: ``outputs`` has ``SamplingParams.n`` texts."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """A model, its memory and its scheduler in this process.

    Takes the options of ``tenfold.assembly.assemble``; ``memory`` is the size of the arena. A ``profile`` is complete
    when the interpreter ends, or after ``engine.profile.close()``. Not safe to call from two threads at once.

    >>> llm = LLM("smollm2-135m-instruct", memory="512MiB")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, **options: Any) -> None:
        assembly = assemble(model, **options)
        self.engine = assembly.engine
        self.loaded = assembly.loaded

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ModelError when the model has none."""
        return self.loaded.require_tokenizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run all prompts together and return their outputs in the order of the prompts.

        ``prompts`` are strings or lists of token ids; ``params`` one for all, or one each. Ctrl-C ends what is running
        after the current step, raises KeyboardInterrupt and leaves the object usable.

        Raises:
            RequestError: a prompt or its parameters cannot be run; nothing was started then.
            EngineError: a step failed.
        """
        return self._answer([(prompt, ()) for prompt in _listed(prompts)], params, use_tqdm)

    def _answer(
        self,
        prompts: list[tuple[Prompt, tuple[int, ...]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Run prompts, each with its breakpoints."""
        if params is None or isinstance(params, SamplingParams):
            chosen = [params or SamplingParams()] * len(prompts)
        else:
            chosen = list(params)
            if len(chosen) != len(prompts):
                raise RequestError(f"{len(prompts)} prompts and {len(chosen)} parameters: give one, or one each")
        jobs = [_Job(self, *prompt, p) for prompt, p in zip(prompts, chosen, strict=True)]
        for job in jobs:
            self.engine.request(job.output.prompt_token_ids, job.params)
        total = sum(job.params.samples for job in jobs)
        with tqdm(total=total, desc="Generating", unit=" sequences", disable=not use_tqdm) as bar:
            self._run(jobs, bar)
        for job in jobs:
            job.keep_the_best()
        return [job.output for job in jobs]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template (``tenfold.engine.chat``).

        Raises:
            RequestError: as ``generate``, or the template rejects the messages.
        """
        several = bool(messages) and not isinstance(messages[0], dict)
        conversations: Any = messages if several else [messages]
        return self._answer([render_chat(self.tokenizer, each) for each in conversations], params, use_tqdm)

    def stats(self) -> dict[str, Any]:
        """Counts and mean times of the engine since it was made (``tenfold.engine.metrics.Metrics.stats``)."""
        return self.engine.metrics.stats()

    def _run(self, jobs: list[_Job], bar: Any) -> None:
        owners: dict[int, tuple[_Job, int]] = {}
        try:
            with deferred_interrupt() as interrupted:
                for job in jobs:
                    ids = self.engine.submit(job.output.prompt_token_ids, job.params, breakpoints=job.breakpoints)
                    owners.update((sequence, (job, index)) for index, sequence in enumerate(ids))
                while owners:
                    for event in self.engine.step():
                        owner = owners.get(event.sequence)
                        if owner is not None and self._take(event, *owner):
                            del owners[event.sequence]
                            bar.update(1)
                    if interrupted:
                        raise KeyboardInterrupt
        finally:
            for sequence in owners:
                self.engine.finish(sequence, FinishReason.CANCELLED)
            while self.engine.scheduler.inflight:
                self.engine.step()

    def _take(self, event: TokenEvent, job: _Job, index: int) -> bool:
        """Add a token to its output; True when the output is complete."""
        if event.finish_reason is FinishReason.ERROR:
            raise EngineError("the step that computed this prompt failed; the log says why")
        if job.take(event, index):
            self.engine.finish(event.sequence, FinishReason.STOP)
            return True
        return event.finish_reason is not None


class _Job:
    """One prompt on its way to its output."""

    def __init__(self, llm: LLM, prompt: Prompt, breakpoints: tuple[int, ...], params: SamplingParams) -> None:
        tokens = [int(token) for token in llm.tokenizer.encode(prompt)] if isinstance(prompt, str) else list(prompt)
        if params.stop:
            llm.loaded.require_tokenizer()
        self.params = params
        self.breakpoints = breakpoints
        with_logprobs = params.logprobs is not None
        outputs = [CompletionOutput(index, logprobs=[] if with_logprobs else None) for index in range(params.samples)]
        self._scores = [Score() for _ in outputs] if params.samples > params.n else []
        self.output = RequestOutput(prompt if isinstance(prompt, str) else None, tokens, outputs)
        self._texts: list[TextStream] = []
        if llm.loaded.tokenizer is not None:
            self._texts = [TextStream.of(llm.tokenizer, tokens, params) for _ in outputs]

    def take(self, event: TokenEvent, index: int) -> bool:
        """Add a token; True if a stop string ended the text here."""
        output = self.output.outputs[index]
        output.token_ids.append(event.token)
        if self._scores:
            self._scores[index].add(event)
        if output.logprobs is not None and event.logprobs is not None:
            output.logprobs.append(event.logprobs)
        output.score = event.score
        ended = event.finish_reason
        if self._texts:
            text = self._texts[index]
            if ended is not FinishReason.STOP:
                output.text += text.push(event.token)
            if ended is not None:
                output.text += text.flush()
            if text.stopped:
                ended = FinishReason.STOP
        if ended is not None:
            output.finish_reason = ended.value
        return ended is FinishReason.STOP and event.finish_reason is None

    def keep_the_best(self) -> None:
        """Leave as many outputs as were asked for, once all of them are complete."""
        if self._scores:
            kept = [self.output.outputs[index] for index in best(self._scores, self.params.n)]
            self.output.outputs = [replace(output, index=index) for index, output in enumerate(kept)]


def _listed(prompts: Any) -> list[Prompt]:
    """A single prompt, as a string or as token ids, counts as a list of one."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if single else list(prompts)
