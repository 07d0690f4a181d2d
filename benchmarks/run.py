"""Run the benchmarks and write a Markdown report.

    python -m benchmarks.run [NAME ...] [--output FILE]

A benchmark is a module of this package named in ``BENCHMARKS``, with ``add_arguments(parser)`` for its own options
and ``main(args)`` that returns a ``Result``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.report import machine_line, table

BENCHMARKS = {
    "scheduler": "One decode step of the scheduler alone: plan and commit, no model",
    "step": "Where the time of a step goes, with a real model",
    "reuse": "Prefix reuse with real models: turns, shared prompts, joins and samples",
    "memory": "The share of KV memory that holds tokens, on recorded request lengths",
    "prefix_traces": "Prompt tokens that need not be computed, on recorded prompts, by how states are kept",
    "sharing": "Blocks that samples and beams of one prompt have in common",
    "accuracy": "Weights of fewer bits: perplexity of real text, decoding speed and memory",
    "kernels": "Compiled CPU kernels against the machine's bandwidth and arithmetic",
    "serving": "Requests served in this process, against the machine's limits",
}
OUTPUT = Path(__file__).resolve().parent.parent / "bench-results" / "bench.md"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description="Benchmarks that need no accelerator.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run: {', '.join(BENCHMARKS)} (default all)")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help="report (default %(default)s)")
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in BENCHMARKS}
    for name, module in modules.items():
        module.add_arguments(parser.add_argument_group(name))
    args = parser.parse_args(arguments)
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is named {unknown[0]!r}: there are {', '.join(BENCHMARKS)}")

    machine = machine_line()
    print(machine, flush=True)
    sections = ["# Benchmarks", machine]
    for name in args.names or BENCHMARKS:
        print(f"\n{BENCHMARKS[name]}\n", flush=True)
        result = modules[name].main(args)
        body = [table(result.rows)] if result.rows else []
        body.append("\n".join(f"- {note}" for note in result.notes))
        print("\n\n".join(body), flush=True)
        sections += [f"## {BENCHMARKS[name]}", *body]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    print(f"\nwritten to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
