"""Which addresses may be served: without keys, those that only this host can reach.

Asked by a gateway before it listens, and by `up` before it starts anything.
"""

from __future__ import annotations

import ipaddress

from scheduler.settings import GatewaySettings


def is_loopback(host: str) -> bool:
    """Whether only this host can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def why_not_served(gateway: GatewaySettings) -> str | None:
    """Why gateways may not listen there; None when they may."""
    if gateway.insecure or is_loopback(gateway.host):
        return None
    return (
        f"{gateway.host} can be reached from other hosts and there are no keys; "
        "listen on 127.0.0.1 or say --insecure"
    )
