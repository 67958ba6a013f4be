"""Verdicts: who a failed run blames."""

from __future__ import annotations

import pytest
import torch

from gpu_agent.device.verdict import Verdict, classify
from vramgate.errors import Cancelled, InputError


def _accelerator_error(code: int) -> BaseException:
    error = torch.AcceleratorError("CUDA error: something")
    error.error_code = code  # type: ignore[attr-defined]
    return error


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def _during(error: BaseException, context: BaseException, *, suppressed: bool = False) -> BaseException:
    error.__context__ = context
    error.__suppress_context__ = suppressed
    return error


SCRIPTED = (
    "The following operation failed in the TorchScript interpreter.\nTraceback of TorchScript:\n"
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB."
)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), Verdict.OOM),
        (RuntimeError(SCRIPTED), Verdict.OOM),
        (RuntimeError("CUDA error: out of memory"), Verdict.OOM),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            Verdict.OOM,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"), Verdict.OOM),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Verdict.OOM),
        (_accelerator_error(2), Verdict.OOM),
        (_caused(ValueError("step 3 failed"), torch.OutOfMemoryError("x")), Verdict.OOM),
        (_during(KeyError("cleanup"), RuntimeError("CUDA out of memory")), Verdict.OOM),
        (_accelerator_error(700), Verdict.STICKY_SUSPECT),
        (_accelerator_error(719), Verdict.STICKY_SUSPECT),
        (_accelerator_error(12345), Verdict.STICKY_SUSPECT),
        (RuntimeError("CUDA error: device-side assert triggered"), Verdict.STICKY_SUSPECT),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Verdict.STICKY_SUSPECT),
        (RuntimeError("CUDA error: unspecified launch failure"), Verdict.STICKY_SUSPECT),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), Verdict.STICKY_SUSPECT),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), Verdict.STICKY_SUSPECT),
        (_caused(TypeError("x"), RuntimeError("CUDA error: misaligned address")), Verdict.STICKY_SUSPECT),
        (_accelerator_error(1), Verdict.MODEL),
        (RuntimeError("CUDA error: invalid configuration argument"), Verdict.MODEL),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), Verdict.MODEL),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), Verdict.MODEL),
        (ValueError("the prompt says: CUDA out of memory"), Verdict.MODEL),
        (MemoryError(), Verdict.MODEL),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Verdict.MODEL),
        (_during(ValueError("x"), torch.OutOfMemoryError("x"), suppressed=True), Verdict.MODEL),
        (KeyboardInterrupt(), Verdict.MODEL),
        (InputError("the image is empty"), Verdict.INPUT),
        (_caused(InputError("no such language"), RuntimeError("CUDA error: x")), Verdict.INPUT),
        (Cancelled("all left"), Verdict.CANCELLED),
    ],
)
def test_verdicts(error: BaseException, verdict: Verdict) -> None:
    """Type, error code and text, each over the chain of causes, blame memory, context, caller or model."""
    assert classify(error, device_oom=False) is verdict


def test_an_observed_oom_outranks_what_was_raised() -> None:
    """When the allocator refused during the run, the run is an OOM whatever the model made of it."""
    assert classify(ValueError("could not decode"), device_oom=True) is Verdict.OOM


def test_a_circle_of_causes_ends() -> None:
    """An exception that is its own cause's cause is judged like any other."""
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(first, device_oom=False) is Verdict.MODEL
