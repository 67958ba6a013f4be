"""The rules of vramgate and all of its Redis: admission, leases, cards, jobs, results, reaping, estimates.

Knows neither gateway nor gpu_agent, no FastAPI and no torch. Everything that touches the ledger goes through
a script in `lua/`, run by `scheduler.store.Store`.
"""
