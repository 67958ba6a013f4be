"""The key space of one pool, drawn once. `lua/_lib/base.lua` builds the same names; a test holds them equal.

Everything lives under one hash tag, so that a pool is one cluster slot:

vg:{pool}:meta          hash    clock:<layout>, incarnation, stamps, results, audit owner: the pool
vg:{pool}:stats         hash    counters since the pool began                      owner: the pool
vg:{pool}:limits        hash    waiting jobs and payload bytes by pool, model, tenant owner: the live jobs
vg:{pool}:rate          hash    measured grants per class                          owner: the models
vg:{pool}:sessions      zset    c:<card> | g:<worker> -> end of its session        owner: the sessions
vg:{pool}:cards         zset    card -> last seen                                  a while (known_ttl_s)
vg:{pool}:card:<card>   hash    r: state, sample, sums (lease.lua); models (hosting.lua) owner: cards
vg:{pool}:host:<card>   string  what it hosts, msgpack                             owner: cards
vg:{pool}:leases:<card> hash    lease id -> record, packed (lease.lua)             owner: cards
vg:{pool}:ready:<card>  list    jobs leased and not handed out                     owner: cards
vg:{pool}:wake:<card>   list    a hint: work to claim, or what only a beat tells   TTL
vg:{pool}:models        zset    model -> last seen                                 a while (known_ttl_s)
vg:{pool}:model:<model> hash    version -> descriptor; @since                      owner: models
vg:{pool}:on:<class>    set     the cards that know a class                        owner: cards
vg:{pool}:classes       set     classes with waiters                               owner: the waiters
vg:{pool}:q:<class>     zset    waiting jobs by effective time                     owner: the waiters
vg:{pool}:jobs          zset    every job by creation                              owner: the jobs
vg:{pool}:job:<id>      string  the record, packed (job.lua, records.py)           live, then TTL
vg:{pool}:pay:<id>      string  inputs                                             live job, then gone or TTL
vg:{pool}:res:<id>      string  result                                             TTL
vg:{pool}:ev:<id>       stream  progress and output                                TTL
vg:{pool}:deadlines     zset    live jobs by their next clock                      owner: the live jobs
vg:{pool}:results       zset    <id>:<bytes> by expiry                             owner: the results
vg:{pool}:delivered     zset    <id>:<bytes> by expiry, of answers without a key   owner: the results
vg:{pool}:letters       zset    <id>:<bytes> by expiry, inputs of failed jobs      owner: the dead letters
vg:{pool}:up:<lease>    string  a large result before finish adopts it             TTL
vg:{pool}:expiry        zset    settled jobs by the end of their record            owner: the records
vg:{pool}:gwj:<worker>  set     synchronous jobs without a key                     owner: its session
vg:{pool}:st:<worker>   stream  what a gateway worker is told                      TTL
vg:{pool}:key:<digest>  string  fingerprint and job id                             TTL
vg:{pool}:tomb:<client> string  a submit that was given up                         TTL
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of one pool's keys."""

    pool: str

    def name(self, kind: str, suffix: str | None = None) -> str:
        """`vg:{pool}:<kind>[:<suffix>]`."""
        return f"vg:{{{self.pool}}}:{kind}" + (f":{suffix}" if suffix is not None else "")

    @property
    def meta(self) -> str:
        return self.name("meta")

    def job(self, job_id: str) -> str:
        return self.name("job", job_id)

    def card(self, card: str) -> str:
        return self.name("card", card)

    def idempotency(self, tenant: str, key: str) -> str:
        """Tenant and key hashed together: both are chosen by callers, of any length."""
        digest = hashlib.sha256(f"{len(tenant)}:{tenant}:{key}".encode()).hexdigest()
        return self.name("key", digest)

    def tombstone(self, client: str) -> str:
        return self.name("tomb", client)
