"""One agent per card: a supervisor that owns Redis, NVML and the heartbeat, and a child that owns torch."""
