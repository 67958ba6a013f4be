"""What this agent says of itself in its beats: one consistent word, replaced as a whole.

Owns: the state of the card with its reason, the number of the published models, and that held jobs and the
applied number always belong together. Read by the heartbeat's thread, written by the supervisor's.
"""

from __future__ import annotations

from collections.abc import Callable

from gpu_agent.heartbeat import Word
from gpu_agent.held import Held
from gpu_agent.hosting import CardModels
from scheduler.handover import Beat
from scheduler.registration import HostedModel
from scheduler.states import AgentState

_Said = tuple[str, AgentState, str | None, int, tuple[tuple[str, str], ...]]
"""Session, state, reason, applied number, held (job, lease)."""


class Voice:
    """The word, and who is to be told that it changed in earnest."""

    def __init__(self, models: CardModels, held: Held) -> None:
        self._models = models
        self._held = held
        # Each replaced as one, for the other thread: the models with their slots and their number; what is
        # held with the number that was applied.
        self._hosted: tuple[tuple[HostedModel, ...], int, int] = ((), 0, 0)
        self._said: _Said | None = None
        self._session: str | None = None
        self._applied: Callable[[], int] = lambda: 0
        self.state: AgentState = "starting"
        self.reason: str | None = "the agent is starting"
        self.nudge: Callable[[], None] = lambda: None

    def speak_for(self, session: str, applied: Callable[[], int]) -> None:
        """A session was begun: beats speak for it from now on."""
        self._session, self._applied = session, applied
        self.refresh()

    def fall_silent(self) -> None:
        """The session is over: nothing may be said in its name."""
        self._session, self._said = None, None

    def say(self, state: AgentState, reason: str | None) -> None:
        """Another state, told at once."""
        self.state, self.reason = state, reason
        self.refresh_models()
        self.refresh()
        self.nudge()

    def refresh_models(self) -> None:
        """The models may have changed: they are sent again only when they did."""
        published = self._models.published()
        before, _, number = self._hosted
        if published != before:
            self._hosted = (published, self._models.slots, number + 1)

    def refresh(self) -> None:
        """What is held, or the applied number, has changed."""
        if self._session is not None:
            # The word itself is made when it is said, which is far less often.
            self._said = (self._session, self.state, self.reason, self._applied(), self._held.pairs)

    def word(self) -> Word | None:
        """For the heartbeat's thread: the word, with the starts as old as they are now."""
        said = self._said
        if said is None:
            return None
        session, state, reason, applied, held = said
        models, slots, number = self._hosted
        beat = Beat(state, reason, applied, held, self._held.starts(), sample=None, models=models)
        return Word(session, beat, slots=slots, models_number=number)
