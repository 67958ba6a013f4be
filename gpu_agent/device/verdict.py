"""What a failed run says about the card, the model and the caller: `classify`.

Owns the reading of exceptions, torch's and CUDA's included, without importing torch. Owns no consequence: the
child checks a suspect with synchronise and canary, the supervisor decides on retries and crash counts.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator

from gpu_agent.text import plain_text
from vramgate.errors import Cancelled, InputError


class Verdict(enum.Enum):
    """Who is to blame, as far as the exception tells."""

    OOM = "oom"
    """The card had no room: release, then bisect the batch or run the job alone."""
    STICKY_SUSPECT = "sticky_suspect"
    """The context may be broken: synchronise and canary decide before anything else runs in this process."""
    INPUT = "input"
    """The model refused the caller's input: never counted against model or card."""
    CANCELLED = "cancelled"
    """The model stopped because its whole batch was cancelled."""
    MODEL = "model"
    """The model's own failure: settled as such, the process goes on."""


_MEMORY_CODE = 2  # cudaErrorMemoryAllocation
# CUDA runtime errors of a call that was refused; they leave the context whole. Every other code is a suspect.
_HARMLESS_CODES = frozenset(
    {1, 9, 12, 13, 16, 17, 18, 19, 20, 21, 98, 101, 200, 209, 218, 221, 222, 223, 701, 704, 705, 800, 801}
)

_OOM_TEXT = re.compile(
    r"(CUDA|HIP|CUBLAS|CUDNN)[ _]error: out of memory"
    r"|CUDA out of memory"
    r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|CUFFT)_(STATUS_)?ALLOC_FAILED"
    # A handle that cannot be created is nearly always a card that is full.
    r"|CUBLAS_STATUS_NOT_INITIALIZED",
    re.IGNORECASE,
)
_HARMLESS_TEXT = re.compile(
    r"CUDA error: (invalid (argument|configuration argument|device function|device ordinal)"
    r"|no kernel image is available|operation not supported|too many resources requested for launch)"
    r"|(CUBLAS_STATUS|CUDNN_STATUS)_(NOT_SUPPORTED|INVALID_VALUE|BAD_PARAM|ARCH_MISMATCH)"
)
_SUSPECT_TEXT = re.compile(
    r"CUDA error|CUDA driver error|device-side assert|an illegal memory access|unspecified launch failure"
    r"|misaligned address|illegal instruction was encountered|uncorrectable (NVLink|ECC) error"
    r"|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_[A-Z_]+|CUFFT_[A-Z_]+|NCCL error",
    re.IGNORECASE,
)


def classify(error: BaseException, *, device_oom: bool) -> Verdict:
    """Judge `error`, raised by a model's code; `device_oom` is whether the allocator refused during that run.

    In this order: the allocator's own count, the type, CUDA's error code, and the text, each over the chain
    of causes. Types come late because TorchScript and cuBLAS hide them, and the text last because a model may
    print anything.
    """
    if device_oom:
        return Verdict.OOM
    if isinstance(error, InputError):
        return Verdict.INPUT
    if isinstance(error, Cancelled):
        return Verdict.CANCELLED
    for cause in _chain(error):
        verdict = _judge_one(cause)
        if verdict is not None:
            return verdict
    return Verdict.MODEL


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, as a traceback would print it; cycles and endless chains are cut."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen and len(seen) < 32:
        seen.add(id(cause))
        yield cause
        following = cause.__cause__
        cause = following if following is not None or cause.__suppress_context__ else cause.__context__


def _judge_one(error: BaseException) -> Verdict | None:
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return Verdict.OOM
    code = getattr(error, "error_code", None)
    if isinstance(code, int) and _is_accelerator_error(error):
        if code == _MEMORY_CODE:
            return Verdict.OOM
        return None if code in _HARMLESS_CODES else Verdict.STICKY_SUSPECT
    # torch raises RuntimeError for all that it does not type; a ValueError that quotes CUDA is only talking
    # about it.
    if not isinstance(error, RuntimeError):
        return None
    text = plain_text(error)
    if _OOM_TEXT.search(text):
        return Verdict.OOM
    if _HARMLESS_TEXT.search(text):
        return None
    return Verdict.STICKY_SUSPECT if _SUSPECT_TEXT.search(text) else None


def _is_accelerator_error(error: BaseException) -> bool:
    return any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__)
