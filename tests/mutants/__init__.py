"""Product code made wrong on purpose, and the tests that must notice: `python -m tests.mutants`."""

from tests.mutants import recording, relay, store, trainer, worker

MUTANTS = (*recording.MUTANTS, *store.MUTANTS, *relay.MUTANTS, *worker.MUTANTS, *trainer.MUTANTS)
