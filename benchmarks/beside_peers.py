"""One engine among others: passes over workload files, reported as the other engines' scripts report theirs.

    python run.py tenfold -- python -m benchmarks.beside_peers --peers DIR [--workloads w1,w2,w3] [--model NAME]

``DIR`` holds those scripts, of which this uses ``common.py``: it waits for a quiet machine, marks passes that something
else disturbed, and prints a line for each that ``run.py`` collects.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.serving import Sent, serve


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=Path, required=True, metavar="DIR")
    parser.add_argument("--workloads", default="w2,w3,w1")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--quantize", default=None)
    args = parser.parse_args()
    if not (args.peers / "common.py").is_file():
        parser.error(f"{args.peers} holds no common.py")
    sys.path.insert(0, str(args.peers))
    common: Any = importlib.import_module("common")

    from tenfold import LLM, SamplingParams

    began = time.time()
    llm = LLM(args.model, memory=args.memory, quantize=args.quantize, progress=False)
    loaded = time.time() - began
    llm.generate([[1, 9690, 198, 2683]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    common.emit("first_token", load_s=loaded)

    def run_one(workload: dict[str, Any]) -> tuple[float, dict[int, list[float]], None, None, dict[str, Any]]:
        requests = workload["requests"]
        result = serve(llm.engine, [Sent(each["prompt_token_ids"], each["output_len"]) for each in requests])
        times = {each["id"]: times for each, times in zip(requests, result.times, strict=True)}
        return 0.0, times, None, None, {"steps": result.steps}

    common.passes(os.environ.get("BENCH_TAG", "tenfold"), run_one, args.workloads.split(","), args.passes)


if __name__ == "__main__":
    main()
