# Every target is a thin call of a script, which first makes .venv if it is missing or out of date.
# Arguments go through ARGS: make test ARGS="tests/core -x". PYTHON chooses the interpreter that .venv is made from.

ARGS ?=

.PHONY: help serve test lint demo bench

help: ## list the targets
	@sed -n 's/^\([a-z]*\): ## /  make \1|/p' Makefile | while IFS='|' read -r name text; do printf '%-14s %s\n' "$$name" "$$text"; done

serve: ## start the server; ARGS go to `tenfold serve`
	@scripts/serve.sh $(ARGS)

test: ## run the tests; ARGS go to pytest
	@scripts/test.sh $(ARGS)

lint: ## ruff, its format check and mypy
	@scripts/lint.sh

demo: ## one session reserved, ten paged: the arena drawn live; ARGS go to benchmarks.demo
	@scripts/demo.sh $(ARGS)

bench: ## run the benchmarks and write bench-results/bench.md; ARGS go to benchmarks.run
	@scripts/bench.sh $(ARGS)
