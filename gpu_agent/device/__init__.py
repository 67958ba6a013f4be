"""The card, seen from two processes.

The supervisor sees what the driver says (`reading`, with `nvml` or `simulated` behind it) and never imports
torch. The child sees what torch holds (`torch_device`, with `cuda` or `sim_torch` behind it). Nothing above
this package knows whether a card is simulated.
"""
