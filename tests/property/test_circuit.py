"""The circuit against an oracle that keeps all that happened and adds it up anew each time; and bugs that it
must catch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core import circuit as core
from coordinator.core.circuit import (
    CLOSED,
    Circuit,
    CircuitPolicy,
    CircuitState,
    Counts,
    Outcome,
    OutcomeWindow,
    Probe,
)

RUN = settings(max_examples=200, deadline=None, derandomize=True, database=None)
Patch = pytest.MonkeyPatch

SPAN, PARTS = 1_000, 10
WIDTH = SPAN // PARTS

STEPS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 49, 99, 100, 101, 350, 899, 1_000, 5_000]),
        st.sampled_from(["ended", *Outcome]),
        st.sampled_from("abc"),
    ),
    max_size=40,
)


def brute(told: list[tuple[int, object, str]], now: int) -> Counts:
    """Everything told whose part of time is one of the last ten."""
    live = [(what, session) for when, what, session in told if now // WIDTH - when // WIDTH < PARTS]
    kinds = [what for what, _ in live]
    losses = kinds.count(Outcome.LEASE_LOSS)
    successes, failures = kinds.count(Outcome.SUCCESS), kinds.count(Outcome.FAILURE)
    return Counts(
        attempts=max(len(kinds) - losses, successes + failures + losses),
        successes=successes,
        failures=failures,
        lease_losses=losses,
        lost_sessions=len({session for what, session in live if what is Outcome.LEASE_LOSS}),
    )


def run_window(steps: list[tuple[int, object, str]], start: int) -> None:
    window, told, now = OutcomeWindow(SPAN, PARTS), [], start
    for later, what, session in steps:
        now += later
        told.append((now, what, session))
        if isinstance(what, Outcome):
            window.add(what, now, session)
        else:
            window.ended(now)
        assert window.counts(now) == brute(told, now)
    assert window.counts(now + SPAN) == Counts()


def run_thresholds(steps: list[tuple[int, object, str]]) -> None:
    policy = CircuitPolicy(
        min_outcomes=4, failure_ratio=0.75, min_lost_sessions=2, loss_ratio=0.5, window_ms=SPAN, buckets=PARTS
    )
    told, now = [], 0
    for later, what, session in steps:
        now += later
        told.append((now, what, session))
        counts = brute(told, now)
        judged = counts.successes + counts.failures
        fails = judged >= 4 and Fraction(counts.failures, judged) >= Fraction(3, 4)
        loses = counts.lost_sessions >= 2 and Fraction(counts.lease_losses, counts.attempts) >= Fraction(1, 2)
        assert bool(core.why_open(counts, policy)) is (fails or loses)


def run_pause(openings: int, chance: float) -> None:
    policy = CircuitPolicy(first_pause_ms=500, longest_pause_ms=60_000, jitter=0.2)
    whole = min(60_000, 500 * 2 ** (openings - 1))
    assert core.pause_ms(policy, openings, 0.0) == whole
    assert whole * 0.8 - 1 <= core.pause_ms(policy, openings, chance) <= whole


@dataclass
class Model:
    """The shared circuit as a list of all that happened since it last closed."""

    history: list[str] = field(default_factory=list)
    probe: Probe | None = None
    probe_ms: int = 0

    @property
    def state(self) -> CircuitState:
        if not self.history:
            return CircuitState.CLOSED
        return CircuitState.OPEN if self.history[-1] == "open" else CircuitState.HALF_OPEN

    @property
    def openings(self) -> int:
        return self.history.count("open")

    @property
    def passed(self) -> int:
        """Successes since it last opened."""
        since = self.history[::-1]
        return since[: since.index("open")].count("success") if since else 0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from([0, 99, 100, 101, 1_600, 100_000]),
        st.sampled_from(["open", "start", "start", "success", "success", "failure", "neither", "stranger"]),
        st.sampled_from("ab"),
    ),
    min_size=5,
    max_size=40,
)


def run_circuit(events: list[tuple[int, str, str]], needed: int) -> None:
    policy = CircuitPolicy(probes_to_close=needed, first_pause_ms=100, longest_pause_ms=1_600, jitter=0.0)
    model, circuit, now = Model(), CLOSED, 1_000
    for number, (later, event, who) in enumerate([(0, "open", "a"), *events]):
        now += later
        before = circuit
        after: Circuit | None
        if event == "open":
            after = core.open_circuit(circuit, policy, now, jitter_number=0.0, reason="r", who=who)
            if model.state is not CircuitState.OPEN:
                opened(model, now)
        elif event == "start":
            probe = Probe(job_id=who, attempt=number, who=who)
            after = core.start_probe(circuit, probe, now)
            may = now >= model.probe_ms if model.state is CircuitState.OPEN else model.probe is None
            if model.state is not CircuitState.CLOSED and may:
                model.history.append("start")
                model.probe = probe
        else:
            held = model.probe or Probe(job_id=who, attempt=number)
            if event == "stranger":
                held = Probe(job_id=held.job_id, attempt=held.attempt + 1)
            verdict = Outcome.SUCCESS if event in ("success", "stranger") else Outcome(event)
            after = core.end_probe(circuit, policy, held, verdict, now, jitter_number=0.0, who=who)
            if model.probe is not None and event != "stranger":
                ended(model, event, needed, now)
        circuit = after if after is not None else circuit
        assert after is None or after != before, "an answer is a change"
        assert (circuit.state, circuit.probe) == (model.state, model.probe)
        if model.state is not CircuitState.CLOSED:
            assert (circuit.openings, circuit.passed) == (model.openings, model.passed)
            assert circuit.probe_ms == model.probe_ms
        else:
            assert circuit == CLOSED


def opened(model: Model, now: int) -> None:
    """The pause is 100 ms, doubled for each opening before, at most 1.6 s."""
    model.probe = None
    model.probe_ms = now + min(1_600, 100 * 2**model.openings)
    model.history.append("open")


def ended(model: Model, event: str, needed: int, now: int) -> None:
    """What the end of the probe leads to."""
    model.probe = None
    if event == "failure":
        opened(model, now)
    elif event == "success":
        model.history.append("success")
        if model.passed == needed:
            model.history.clear()


FRACTIONS = st.floats(0, 1, exclude_max=True)


@RUN
@given(STEPS, st.integers(0, 10**9))
def test_the_window_counts_what_came_in_its_span_and_nothing_else(
    steps: list[tuple[int, object, str]], start: int
) -> None:
    run_window(steps, start)


@RUN
@given(STEPS)
def test_it_opens_if_and_only_if_one_of_the_two_ratios_is_reached_with_enough_to_go_by(
    steps: list[tuple[int, object, str]],
) -> None:
    run_thresholds(steps)


@RUN
@given(st.integers(1, 10_000), FRACTIONS)
def test_the_pause_doubles_up_to_its_cap_and_chance_only_shortens_it(openings: int, chance: float) -> None:
    run_pause(openings, chance)


@RUN
@given(EVENTS, st.integers(1, 4))
def test_one_probe_at_a_time_successes_in_a_row_close_and_a_failure_reopens_for_longer(
    events: list[tuple[int, str, str]], needed: int
) -> None:
    run_circuit(events, needed)


# -- bugs

BUGS: dict[str, Callable[[Patch], None]] = {}


def _bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS[plant.__name__] = plant
    return plant


@_bug
def the_window_forgets_nothing(patch: Patch) -> None:
    patch.setattr(OutcomeWindow, "_forget", lambda self, index: None)


@_bug
def the_window_is_one_part_short(patch: Patch) -> None:
    original = OutcomeWindow._forget
    patch.setattr(OutcomeWindow, "_forget", lambda self, index: original(self, index + 1))


@_bug
def a_loss_counts_as_another_end(patch: Patch) -> None:
    original = OutcomeWindow.add

    def add(self: OutcomeWindow, outcome: Outcome, now_ms: int, session: str = "") -> None:
        original(self, outcome, now_ms, session)
        if outcome is Outcome.LEASE_LOSS:
            self.ended(now_ms)

    patch.setattr(OutcomeWindow, "add", add)


@_bug
def losses_of_one_session_count_as_several(patch: Patch) -> None:
    original = OutcomeWindow.counts

    def counts(self: OutcomeWindow, now_ms: int) -> Counts:
        found = original(self, now_ms)
        return replace(found, lost_sessions=found.lease_losses)

    patch.setattr(OutcomeWindow, "counts", counts)


@_bug
def a_ratio_of_few_opens(patch: Patch) -> None:
    original = core.why_open
    patch.setattr(core, "why_open", lambda counts, policy: original(counts, replace(policy, min_outcomes=1)))


@_bug
def one_session_is_enough(patch: Patch) -> None:
    original = core.why_open

    def why_open(counts: Counts, policy: CircuitPolicy) -> str:
        return original(counts, replace(policy, min_lost_sessions=1))

    patch.setattr(core, "why_open", why_open)


@_bug
def failures_are_taken_of_all_attempts(patch: Patch) -> None:
    original = core.why_open

    def why_open(counts: Counts, policy: CircuitPolicy) -> str:
        return original(replace(counts, successes=counts.attempts - counts.failures), policy)

    patch.setattr(core, "why_open", why_open)


@_bug
def the_pause_has_no_cap(patch: Patch) -> None:
    original = core.pause_ms
    patch.setattr(
        core,
        "pause_ms",
        lambda policy, openings, number: original(replace(policy, longest_pause_ms=10**18), openings, number),
    )


@_bug
def the_pause_does_not_grow(patch: Patch) -> None:
    original = core.pause_ms
    patch.setattr(core, "pause_ms", lambda policy, openings, number: original(policy, 1, number))


@_bug
def two_probes_at_a_time(patch: Patch) -> None:
    original = core.start_probe

    def start_probe(circuit: Circuit, probe: Probe, now_ms: int) -> Circuit | None:
        return original(replace(circuit, probe=None), probe, now_ms)

    patch.setattr(core, "start_probe", start_probe)


@_bug
def a_probe_before_the_pause_is_over(patch: Patch) -> None:
    original = core.start_probe

    def start_probe(circuit: Circuit, probe: Probe, now_ms: int) -> Circuit | None:
        return original(replace(circuit, probe_ms=min(circuit.probe_ms, now_ms)), probe, now_ms)

    patch.setattr(core, "start_probe", start_probe)


@_bug
def anybodys_end_counts_as_the_probes(patch: Patch) -> None:
    original = core.end_probe

    def end_probe(circuit: Circuit, policy: CircuitPolicy, probe: Probe, *rest: Any, **more: Any) -> Any:
        return original(circuit, policy, circuit.probe or probe, *rest, **more)

    patch.setattr(core, "end_probe", end_probe)


@_bug
def a_probe_that_was_given_back_counts(patch: Patch) -> None:
    original = core.end_probe

    def end_probe(
        circuit: Circuit, policy: CircuitPolicy, probe: Probe, verdict: Outcome, now_ms: int, **more: Any
    ) -> Any:
        judged = Outcome.SUCCESS if verdict is Outcome.NEITHER else verdict
        return original(circuit, policy, probe, judged, now_ms, **more)

    patch.setattr(core, "end_probe", end_probe)


@_bug
def one_success_closes(patch: Patch) -> None:
    original = core.end_probe

    def end_probe(circuit: Circuit, policy: CircuitPolicy, *rest: Any, **more: Any) -> Any:
        return original(circuit, replace(policy, probes_to_close=1), *rest, **more)

    patch.setattr(core, "end_probe", end_probe)


@_bug
def successes_of_before_it_reopened_count(patch: Patch) -> None:
    original = core.start_probe

    def start_probe(circuit: Circuit, probe: Probe, now_ms: int) -> Circuit | None:
        after = original(circuit, probe, now_ms)
        return after and replace(after, passed=max(after.passed, circuit.openings - 1))

    patch.setattr(core, "start_probe", start_probe)


GENERATE_ONLY = settings(RUN, phases=[p for p in RUN.phases if p.name == "generate"])


def run_all() -> None:
    def run(check: Any) -> None:
        settings(GENERATE_ONLY)(check)()

    run(given(STEPS)(lambda steps: run_window(steps, 0)))
    run(given(STEPS)(run_thresholds))
    run(given(st.integers(1, 80), FRACTIONS)(run_pause))
    run(given(EVENTS, st.integers(2, 4))(run_circuit))


def test_the_histories_pass_without_a_bug() -> None:
    run_all()


@pytest.mark.parametrize("bug", BUGS)
def test_the_histories_catch(bug: str, monkeypatch: Patch) -> None:
    BUGS[bug](monkeypatch)

    with pytest.raises(AssertionError):
        run_all()
