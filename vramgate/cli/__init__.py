"""The commands of `vramgate`. Services are started as processes; only the ledger's package is imported."""
