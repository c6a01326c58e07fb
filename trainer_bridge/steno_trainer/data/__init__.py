"""From leased groups to rows: advantages, staleness, and the ledger of tokens (I4)."""
