"""The policy under ZeRO-3: log-probabilities of packed samples, and what memory they take."""
