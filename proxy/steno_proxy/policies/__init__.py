"""Policy updates: new weights on their way to every worker, and who may generate meanwhile (I10)."""
