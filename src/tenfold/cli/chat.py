"""``tenfold chat``: a conversation at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Annotated, Any

import typer

from tenfold.cli import options
from tenfold.core.types import FinishReason, SamplingParams
from tenfold.engine.chat import ChatPrompt, render_chat
from tenfold.engine.engine import Engine
from tenfold.engine.interrupt import deferred_interrupt
from tenfold.engine.ports import Messages
from tenfold.engine.text import TextStream
from tenfold.errors import EngineError, TenfoldError

HELP = "Ctrl-C stops an answer, /reset forgets the conversation, /quit or Ctrl-D leaves."


@options.with_engine_options
def chat(
    *,
    engine: dict[str, Any],
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT,
    system: Annotated[str | None, typer.Option(help="What to tell the model before the conversation.")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    log_level: options.Level = options.LogLevel.WARNING,
) -> None:
    """Talk to a model. Piped standard input is one message: its answer is printed, and that is all."""
    options.configure_logging(log_level)
    given = options.sampling_params(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    params = replace(given, max_tokens=max_tokens)
    from tenfold.llm import LLM

    llm = LLM(model, **engine)
    conversation = Conversation(llm.engine, llm.tokenizer, params, system)
    if sys.stdin.isatty():
        converse(conversation)
    else:
        conversation.say(sys.stdin.read().strip())


class Conversation:
    """The messages so far. ``say`` adds one and its answer, which is printed as it comes."""

    def __init__(self, engine: Engine, tokenizer: Any, params: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._params = params
        self._start: Messages = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)

    def reset(self) -> None:
        self.messages = list(self._start)

    def say(self, text: str) -> None:
        """Answer ``text``. Ctrl-C stops the answer; what there is of it stays in the conversation.

        Raises:
            TenfoldError: it cannot be answered; the conversation is what it was before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = render_chat(self._tokenizer, messages)
        answer = ""
        pieces = stream(self._engine, self._tokenizer, prompt, self._params)
        with deferred_interrupt() as interrupted, closing(pieces):
            for piece in pieces:
                answer += piece
                print(piece, end="", flush=True)
                if interrupted:
                    break
        print()
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def converse(conversation: Conversation) -> None:
    """Read messages from the terminal until the user leaves."""
    with suppress(ImportError):
        import readline  # noqa: F401 (input() then edits lines and remembers them)
    print(HELP)
    while True:
        try:
            text = input("> ").strip()
        except KeyboardInterrupt:
            print(f"\n{HELP}")
            continue
        except EOFError:
            print()
            return
        if text == "/quit":
            return
        if text == "/reset":
            conversation.reset()
            print("The conversation is forgotten.")
        elif text.startswith("/"):
            print(HELP)
        elif text:
            try:
                conversation.say(text)
            except TenfoldError as error:
                print(f"error: {error}\n(/reset starts again)", file=sys.stderr)


def stream(engine: Engine, tokenizer: Any, prompt: ChatPrompt, params: SamplingParams) -> Generator[str]:
    """Yield the text of one answer, a piece for each step, perhaps empty. Closing the iterator ends the answer.

    Raises:
        RequestError: the prompt or the parameters cannot be run.
        EngineError: a step failed.
    """
    (sequence,) = engine.submit(prompt.tokens, params, breakpoints=prompt.breakpoints)
    text = TextStream.of(tokenizer, prompt.tokens, params)
    try:
        ended = False
        while not ended:
            piece = ""
            for event in engine.step():
                if event.finish_reason is FinishReason.ERROR:
                    raise EngineError("the step that computed this answer failed; --log-level says why")
                if event.finish_reason is not FinishReason.STOP:
                    piece += text.push(event.token)
                ended = event.finish_reason is not None or text.stopped
            yield piece + text.flush() if ended else piece
    finally:
        engine.finish(sequence)
        while engine.scheduler.inflight:
            engine.step()
