"""What is told of trials: progress as they end, the results file, and its figures."""
