"""The canary: a matmul whose answer is known, to tell a broken context from a failed run."""

from __future__ import annotations

import torch

_SIDE = 64
_KNOWN = [float(sum((row * _SIDE + column) % 7 for column in range(_SIDE))) for row in range(_SIDE)]


def canary_holds(device: torch.device) -> bool:
    """Whether `device` still multiplies: small whole numbers, so that every order of summation gives the same
    bits.

    Any exception is a no. Needs no memory to speak of, but may hang on a broken card: call it under a
    deadline.
    """
    try:
        with torch.inference_mode():
            matrix = (torch.arange(_SIDE * _SIDE, device=device) % 7).to(torch.float32).view(_SIDE, _SIDE)
            sums = (matrix @ torch.ones(_SIDE, _SIDE, device=device)).cpu()
            return bool(torch.equal(sums, torch.tensor(_KNOWN).unsqueeze(1).expand(_SIDE, _SIDE)))
    except Exception:
        return False
