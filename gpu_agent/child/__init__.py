"""The torch child: the only process of an agent that imports torch and the user's models.

Imports nothing of this project but `vramgate`, `gpu_agent.ipc` and `gpu_agent.device`: a user's directory
may hold its own `scheduler.py` or `gateway/`, and those must be the ones that the user's model gets.
"""
