"""vramgate's face: what a model is written with, and what its callers use.

Light: importing it loads httpx and pydantic, and neither torch nor FastAPI nor redis.
"""

from vramgate import errors
from vramgate.client import Answer, AsyncClient
from vramgate.errors import Cancelled, InputError, Refused, Unreachable, VramgateError
from vramgate.model import Context, Model

__all__ = [
    "Answer",
    "AsyncClient",
    "Cancelled",
    "Context",
    "InputError",
    "Model",
    "Refused",
    "Unreachable",
    "VramgateError",
    "errors",
]
