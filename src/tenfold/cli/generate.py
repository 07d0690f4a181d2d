"""``tenfold generate``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenfold.cli import options
from tenfold.errors import TenfoldError

if TYPE_CHECKING:
    from tenfold.llm import RequestOutput


@options.with_engine_options
def generate(
    *,
    engine: dict[str, Any],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts; without any, standard input is read as one.", show_default=False),
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help=options.MODEL_HELP)] = options.DEFAULT,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt to the model as a chat message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
    samples: Annotated[
        int | None, options.sampling_option("Texts to generate for each prompt.", "--samples", "-n")
    ] = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    log_level: options.Level = options.LogLevel.WARNING,
) -> None:
    """Continue prompts, all of them together, and print the texts."""
    options.configure_logging(log_level)
    params = options.sampling_params(
        n=samples,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    prompts = prompt or [read_prompt()]
    from tenfold.llm import LLM

    llm = LLM(model, **engine)
    if chat:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in prompts], params)
    else:
        outputs = llm.generate(prompts, params)
    if as_json:
        typer.echo(json.dumps(described(llm.loaded.name, prompts, outputs), ensure_ascii=False, indent=2))
    else:
        typer.echo("\n\n".join(completion.text for output in outputs for completion in output.outputs))


def read_prompt() -> str:
    """All of standard input, less the newline that ends it. Raises TenfoldError when there is none."""
    if sys.stdin.isatty():
        raise TenfoldError("there is no prompt: give one as an argument or on standard input")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise TenfoldError("standard input is empty: there is no prompt")
    return text


def described(model: str, prompts: list[str], outputs: list[RequestOutput]) -> dict[str, Any]:
    """The outputs as plain data."""
    return {
        "model": model,
        "outputs": [
            {
                "prompt": prompt,
                "prompt_tokens": len(output.prompt_token_ids),
                "completions": [
                    {
                        "index": completion.index,
                        "text": completion.text,
                        "tokens": len(completion.token_ids),
                        "finish_reason": completion.finish_reason,
                    }
                    for completion in output.outputs
                ],
            }
            for prompt, output in zip(prompts, outputs, strict=True)
        ],
    }
