# Short names for the scripts; the scripts are the interface.
.PHONY: demo test ci lock docs docs-site format

demo:
	./scripts/demo

test:
	./scripts/test

ci:
	./.ci/run

lock:
	./scripts/lock

docs:
	./scripts/docs

docs-site:
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

format:
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .
