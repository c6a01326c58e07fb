"""Product code made wrong on purpose, and the tests that must notice: `python -m tests.mutants`."""

from tests.mutants import recording, relay, routing, store, trainer, worker

MUTANTS = (*recording.MUTANTS, *store.MUTANTS, *relay.MUTANTS, *routing.MUTANTS, *worker.MUTANTS, *trainer.MUTANTS)
