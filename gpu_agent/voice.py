"""What this agent says of itself in its beats: one consistent word, replaced as a whole.

Owns: the state of the card with its reason, the number of the published models, and that held jobs and the
applied number always belong together. Read by the heartbeat's thread, written by the supervisor's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gpu_agent.heartbeat import Word
from gpu_agent.held import Held
from gpu_agent.hosting import CardModels
from scheduler.handover import Beat
from scheduler.registration import HostedModel
from scheduler.states import AgentState


class Voice:
    """The word, and who is to be told that it changed in earnest."""

    def __init__(self, models: CardModels, held: Held) -> None:
        self._models = models
        self._held = held
        self._published: tuple[HostedModel, ...] = ()
        self._number = 0
        self._session: str | None = None
        self._applied: Callable[[], int] = lambda: 0
        self._word: Word | None = None
        self.state: AgentState = "starting"
        self.reason: str | None = "the agent is starting"
        self.nudge: Callable[[], None] = lambda: None

    def speak_for(self, session: str, applied: Callable[[], int]) -> None:
        """A session was begun: beats speak for it from now on."""
        self._session, self._applied = session, applied
        self.refresh()

    def fall_silent(self) -> None:
        """The session is over: nothing may be said in its name."""
        self._session, self._word = None, None

    def say(self, state: AgentState, reason: str | None) -> None:
        """Another state, told at once."""
        self.state, self.reason = state, reason
        self.refresh_models()
        self.refresh()
        self.nudge()

    def refresh_models(self) -> None:
        """The models may have changed: they are sent again only when they did."""
        published = self._models.published()
        if published != self._published:
            self._published = published
            self._number += 1
            self.refresh()

    def refresh(self) -> None:
        """What is held, or the applied number, has changed."""
        if self._session is None:
            return
        self._word = Word(
            session=self._session,
            beat=Beat(
                state=self.state,
                reason=self.reason,
                applied_seq=self._applied(),
                held=self._held.pairs,
                starts=(),
                sample=None,
                models=self._published,
            ),
            slots=self._models.slots,
            models_number=self._number,
        )

    def word(self) -> Word | None:
        """For the heartbeat's thread: the word, with the starts as old as they are now."""
        word = self._word
        if word is None:
            return None
        return dataclasses.replace(word, beat=dataclasses.replace(word.beat, starts=self._held.starts()))
