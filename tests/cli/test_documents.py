"""The public objects have the shapes of the contract, and both memory identities of a card are exact."""

from __future__ import annotations

import dataclasses
import json

import msgpack
import pytest

from scheduler import documents
from scheduler.registration import HostedModel, Sample
from scheduler.submissions import Outcome
from scheduler.views import CardView, JobView, LeaseView, Ledger, ModelOnCard, ModelView, QueueView

JOB = "0f" * 16
LEASE = "1e" * 16

VIEW = JobView(
    id=JOB,
    model="speech",
    version="v1",
    state="queued",
    tenant="-",
    has_key=True,
    priority=4,
    attempt=1,
    clients=1,
    card=None,
    lease_id=None,
    lease_bytes=1000,
    units=2.5,
    peak_bytes=0,
    position=3,
    eta_ms=1200,
    why="card_full",
    created_ms=10_000,
    wait_started_ms=11_000,
    granted_ms=None,
    started_ms=None,
    settled_ms=None,
    deadline_ms=41_000,
    now_ms=12_500,
    run_ms=0,
    crashes=0,
    losses=0,
    code=None,
    detail=None,
    has_result=False,
    events=False,
)
OUTCOME = Outcome(
    job_id=JOB,
    state="succeeded",
    model="speech",
    version="v1",
    code=None,
    detail=None,
    result=msgpack.packb({"image": b"\x00\x01", "parts": [b"a", 1.5]}),
    card="SIM-1",
    wait_ms=5,
    run_ms=7,
    total_ms=13,
    leased_bytes=1000,
    peak_bytes=900,
    attempts=1,
)
MODEL = HostedModel(
    name="speech",
    version="v1",
    ready=True,
    reason=None,
    slots=16,
    max_batch=8,
    lanes=1,
    resident_bytes=100,
    c0_item=10,
    c1=2.5,
    units="seconds(audio)",
    batch_units="max_times_n",
    schema={"type": "object"},
    schema_hash="ab",
)
SAMPLE = Sample(read_ms=1, total=1000, driver=50, used=600, own=500, allocated=350, reserved=400, context=100)
LEDGER = Ledger(
    usable=800,
    resident=100,
    jobs=200,
    external=0,
    lingering=0,
    foreign=100,
    overrun=50,
    withheld=0,
    reserved_for_head=0,
    grantable=350,
)
CARD = CardView(
    id="SIM-1",
    host="box",
    name="box:0",
    index=0,
    product="Simulated",
    state="ready",
    reason=None,
    operator_state="ready",
    session_left_ms=9000,
    simulated=True,
    slots=16,
    jobs=2,
    running=1,
    ledger=LEDGER,
    sample=SAMPLE,
    sample_age_ms=20,
    headroom=50,
    peak_leased_bytes=300,
    models=(MODEL,),
    head=None,
)


def test_a_waiting_job_shows_its_place_and_why() -> None:
    """Unsettled: neither result nor error; the wait clock runs, and eta is rounded up to seconds."""
    document = documents.job_document(VIEW)
    assert document["object"] == "job" and document["state"] == "queued"
    assert (document["position"], document["eta_s"], document["attempts"]) == (3, 2, 1)
    assert document["why"] == "card_full"
    assert document["timing"] == {"wait_ms": 2500, "run_ms": 0, "total_ms": 2500}
    assert document["vram"] == {"leased_bytes": 1000, "peak_bytes": 0}
    assert "result" not in document and "error" not in document


def test_a_running_job_has_a_run_clock() -> None:
    """What it has lived and has not run it has waited, over all its attempts."""
    running = dataclasses.replace(VIEW, state="running", started_ms=12_000, run_ms=500, position=0)
    assert documents.job_document(running)["timing"] == {"wait_ms": 2000, "run_ms": 500, "total_ms": 2500}


def test_a_succeeded_job_has_a_result() -> None:
    """Bytes are base64 text in the JSON form and bytes in the binary one; the whole is JSON."""
    done = dataclasses.replace(VIEW, state="succeeded", started_ms=12_000, settled_ms=12_400, has_result=True)
    document = documents.job_document(done, OUTCOME)
    assert document["result"] == {"image": "AAE=", "parts": ["YQ==", 1.5]}
    assert document["timing"] == {"wait_ms": 5, "run_ms": 7, "total_ms": 13} and document["card"] == "SIM-1"
    assert json.loads(json.dumps(document)) == document
    assert documents.job_document(done, OUTCOME, binary=True)["result"]["image"] == b"\x00\x01"
    assert "result" not in documents.job_document(done)


@pytest.mark.parametrize(
    ("code", "status"), [("run_timeout", 504), ("rejected_by_model", 422), ("from_later", 500)]
)
def test_a_failed_job_has_the_problem_object(code: str, status: int) -> None:
    """`error` is the problem document, from the view alone as well as from the outcome; a code that this
    release does not know is an internal problem."""
    failed = dataclasses.replace(VIEW, state="failed", settled_ms=12_400, code=code, detail="what happened")
    outcome = dataclasses.replace(OUTCOME, state="failed", code=code, detail="what happened", result=None)
    for document in (documents.job_document(failed), documents.job_document(failed, outcome)):
        assert document["error"]["status"] == status and document["error"]["detail"] == "what happened"
        assert document["error"]["instance"] == f"/v1/jobs/{JOB}" and "result" not in document


def test_a_result_that_is_no_longer_stored_is_said() -> None:
    """Succeeded, but the bytes are gone: the problem is `result_expired`."""
    done = dataclasses.replace(VIEW, state="succeeded", settled_ms=12_400)
    document = documents.job_document(done, dataclasses.replace(OUTCOME, result=None))
    assert document["state"] == "succeeded" and document["error"]["code"] == "result_expired"


def test_the_answer_is_the_contract_s_200() -> None:
    """The body of infer has these members and no other."""
    assert documents.answer_document(OUTCOME) == {
        "id": JOB,
        "model": "speech",
        "version": "v1",
        "outputs": {"image": "AAE=", "parts": ["YQ==", 1.5]},
        "card": "SIM-1",
        "timing": {"wait_ms": 5, "run_ms": 7, "total_ms": 13},
        "vram": {"leased_bytes": 1000, "peak_bytes": 900},
        "degraded": False,
    }


def test_both_identities_of_a_card_are_exact() -> None:
    """ledger and measured each add up, and the gap between leased and measured stands beside them."""
    document = documents.card_document(CARD)
    ledger, measured = document["ledger"], document["measured"]
    assert ledger["usable"] == sum(value for name, value in ledger.items() if name != "usable")
    assert measured["total"] == sum(value for name, value in measured.items() if name != "total")
    assert measured["cached"] == 50 and measured["unattributed"] == 100 and measured["free"] == 350
    assert document["gap_bytes"] == 300 - 350
    assert json.loads(json.dumps(document)) == document


def test_external_use_is_seen_once() -> None:
    """What an external lease's processes use is a term of its own and not unattributed as well."""
    sample = dataclasses.replace(SAMPLE, used_by_lease={LEASE: 70})
    measured = documents.card_document(dataclasses.replace(CARD, sample=sample))["measured"]
    assert measured["external"] == 70 and measured["unattributed"] == 30
    assert measured["total"] == sum(value for name, value in measured.items() if name != "total")


def test_a_card_that_was_never_read_shows_no_measurement() -> None:
    """Unknown is not zero."""
    document = documents.card_document(dataclasses.replace(CARD, sample=None, sample_age_ms=None))
    assert document["measured"] is None and document["gap_bytes"] is None


def test_lists_leases_queues_and_models() -> None:
    """The remaining objects name their kind and their id."""
    lease = documents.lease_document(LeaseView(LEASE, "SIM-1", "job", 1000, JOB, "speech", "running", 5, 10))
    queue = documents.queue_document(QueueView("speech", 3, 999, 400, None))
    model = documents.model_document(
        ModelView("speech", 5_500, 9_000, (MODEL,), {"SIM-1": ModelOnCard("v1", True, True, None)})
    )
    assert documents.list_document([lease], "c") == {"object": "list", "data": [lease], "next": "c"}
    assert (lease["object"], lease["id"], lease["cards"], lease["job"]) == ("lease", LEASE, ["SIM-1"], JOB)
    assert (queue["object"], queue["id"], queue["waiting"]) == ("queue", "speech", 3)
    assert (model["object"], model["id"], model["created"]) == ("model", "speech", 5)
    assert model["owned_by"] == "vramgate" and model["ready"]
    assert model["cards"] == [{"id": "SIM-1", "version": "v1", "ready": True, "reason": None}]
    estimate = {"resident_bytes": 100, "bytes_per_item": 10, "bytes_per_unit": 2.5}
    assert model["versions"][0]["estimate"] == estimate
