# Short names for the scripts; the scripts are the interface.
.PHONY: demo test ci lock docs format

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

format:
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .
