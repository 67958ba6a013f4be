"""vramgate.errors: one table, one class for each code, and problem documents that survive the way."""

from __future__ import annotations

import pytest

from vramgate import errors


def test_each_code_has_one_class_named_after_it() -> None:
    """by_code() knows every row of the table, and a class says its row's status and retry."""
    for code, row in errors.TABLE.items():
        error = errors.by_code(code)("words")
        assert (error.code, error.status, error.retry) == (code, row.status, row.retry)
        if code != "rejected_by_model":
            public = "".join(word.capitalize() for word in code.split("_"))
            assert getattr(errors, public) is type(error)
    assert errors.by_code("rejected_by_model") is errors.InputError


@pytest.mark.parametrize("code", sorted(errors.TABLE))
def test_a_problem_document_comes_back_as_it_went(code: str) -> None:
    """The client raises what the gateway raised: class, words, job, pause and data."""
    sent = errors.by_code(code)("job 8f2c: words", retry_after_s=7, job_id="8f2c", queue=12)
    got = errors.from_problem(sent.problem())
    assert type(got) is type(sent)
    assert (got.detail, got.job_id, got.retry_after_s, got.data) == (sent.detail, "8f2c", 7, {"queue": 12})
    assert got.problem() == sent.problem()


def test_an_unknown_code_is_named_and_never_hidden() -> None:
    """A newer server's code becomes Internal, with its words."""
    error = errors.from_problem({"type": "urn:vramgate:too_novel", "title": "Something new", "status": 418})
    assert type(error) is errors.Internal
    assert "Something new" in error.detail


def test_the_field_of_an_input_error_survives() -> None:
    """InputError tells the field on both sides."""
    sent = errors.InputError("is too dark", field="image")
    got = errors.from_problem(sent.problem())
    assert isinstance(got, errors.InputError)
    assert sent.problem()["field"] == "image"
    assert got.field == "image"


def test_a_detail_is_always_text() -> None:
    """InputError({...}) is a mistake of a model's author that must not travel on as a mapping."""
    error = errors.InputError({"a": 1})  # type: ignore[arg-type]
    assert error.detail == "{'a': 1}" == error.problem()["detail"]
