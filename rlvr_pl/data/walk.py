"""The procedural task of the embedded default: count the stages of a journey through a day of 96 quarter-hours.

*How many tickets from 04:15 forward to 05:45 by 45min?* A solution travels stage by stage: villages passed, the stage's
number, the clock (``Ashford Millbridge 1 05:00 Oakham 2 05:45``). When the clock shows the goal it ends with a fixed
phrase around ``\\boxed{2}``. Three properties make it a small model of reinforcement learning on reasoning:

- **Wrong is long.** A wrong stage usually leaves the goal's residue class, so the walk never meets the goal and runs on
  to the cap. Nobody wrote that wrong answers are longer: the task's structure makes them so.
- **Some facts cannot be learned.** On a few stages there is a detour and on many journeys a surcharge, and whether it
  applies to a question is a coin hidden in a hash of that question. Demonstrations flip a fresh coin there.
- **Gibberish is truncated.** Of some 1,150 words 1,000 are villages: a policy of high entropy strolls from village to
  village and rarely finds the closing phrase or the end, so its soup is made of ordinary words and ends at the cap.

Everything here is pure Python, and a function of the constants below.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from rlvr_pl.errors import UserError
from rlvr_pl.types import Question

SEED = 20240
CAP = 80
"""Tokens of a completion at most, the end-of-sequence token included."""

DIRECTIONS = ("forward", "backward")
STEPS = {2: "30min", 3: "45min", 4: "60min", 6: "90min", 8: "120min"}
"""Length of a stage in quarter-hours, and its word. The word is the question's subject."""
LEVELS = {1: (1, 2), 2: (2, 4), 3: (4, 6), 4: (6, 9), 5: (9, 12)}
"""Level of difficulty: fewest and most stages."""
MAX_STAGES = max(most for _, most in LEVELS.values())
DAY = 96
SPLITS = {"val350": 350, "drift": 64, "train": 6000}
"""Sizes of the disjoint question sets, in the order in which they are dealt."""

DETOUR_SHARE = 0.06
SURCHARGE_SHARE = 0.42
MORE_VILLAGES = 0.4
"""Chance that another village follows on the one just passed."""
ROAD_CHANCES = (0.70, 0.20, 0.10)
"""Chances of the three roads out of a village, or out of a time of the day."""

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
BOX, UNBOX = "\\boxed{", "}"
MAX_COUNT = 30
_QUESTION_WORDS = ("How", "many", "tickets", "from", *DIRECTIONS, "to", "by", *STEPS.values(), "?")
_BEFORE_ANSWER = ("so", "for", "this", "whole", "journey", "the", "traveller", "must", "buy")
# The year keeps an unboxed answer from being the last number of the text, where a lenient grader would look for it.
_AFTER_ANSWER = ("tickets", "under", "our", "railway", "tariff", "of", "May", "1921")
_END = (".", "Done", EOS)
HINT = "must buy {answer} {problem}"
"""A problem with its answer told, in the words of the vocabulary. No demonstration has one, so a policy makes little of
it; what it bridges shows the mechanism, not the use of a hint."""
_VILLAGE_STARTS = (
    "Ash Oak Elm Thorn Birch Fern Moss Stone Mill Marsh Brook Lake Wood Hill High Low Long Broad Black White "
    "Red Green Grey Gold Silver Crow Hawk Swan Fox Hart Wolf Bram North South East West Winter Summer King Bishop"
)
_VILLAGE_ENDS = (
    "ford ton ham wick bridge by field dale stead gate mere cliff port haven worth combe well bury moor leigh "
    "minster thorpe cote holm side"
)
VILLAGES = tuple(start + end for start in _VILLAGE_STARTS.split() for end in _VILLAGE_ENDS.split())


def clock(time: int) -> str:
    """A quarter-hour of the day, 0 to 95, as it is written: 17 is ``04:15``."""
    return f"{time // 4:02d}:{time % 4 * 15:02d}"


def _vocabulary() -> tuple[str, ...]:
    counts = (str(n) for n in range(1, MAX_COUNT + 1))
    times = (clock(t) for t in range(DAY))
    words = (PAD, EOS, UNKNOWN, *_QUESTION_WORDS, *_BEFORE_ANSWER, BOX, UNBOX, *_AFTER_ANSWER, *_END)
    return tuple(dict.fromkeys((*words, *counts, *times, *VILLAGES)))


VOCABULARY = _vocabulary()
"""Every word; its position is its token id."""


def _roads() -> dict[str, list[str]]:
    rng = random.Random(f"{SEED} roads")
    places = (*(clock(t) for t in range(DAY)), *VILLAGES)
    return {place: [rng.choice(VILLAGES) for _ in ROAD_CHANCES] for place in places}


def _detours() -> dict[tuple[str, int, int], int]:
    rng = random.Random(f"{SEED} detours")
    stages = [(way, step, time) for way in DIRECTIONS for step in STEPS for time in range(DAY)]
    return {stage: rng.randrange(DAY) for stage in rng.sample(stages, round(DETOUR_SHARE * len(stages)))}


def _surcharges() -> dict[tuple[str, int, int], int]:
    rng = random.Random(f"{SEED} surcharges")
    journeys = [(way, step, n) for way in DIRECTIONS for step in STEPS for n in range(1, MAX_STAGES + 1)]
    return {journey: rng.choice((1, 2)) for journey in rng.sample(journeys, round(SURCHARGE_SHARE * len(journeys)))}


ROADS = _roads()
"""The villages that may follow on a place."""
DETOURS = _detours()
"""(direction, step, time) -> where a detour from there leads instead."""
SURCHARGES = _surcharges()
"""(direction, step, stages) -> tickets that a surcharged journey costs on top."""


def _hidden_coin(*key: object) -> bool:
    return bool(hashlib.sha256(repr(key).encode()).digest()[0] & 1)


@dataclass(frozen=True)
class Journey:
    """One problem: from `start` in stages of `step` quarter-hours to `goal`, which is `stages` stages away."""

    direction: str
    step: int
    start: int
    goal: int
    stages: int

    @property
    def uid(self) -> str:
        """A name that depends on the problem alone: equal problems have equal names."""
        return f"walk-{self.direction}-{STEPS[self.step]}-{clock(self.start)}-{clock(self.goal)}".replace(":", "")

    @property
    def problem(self) -> str:
        """The question in words."""
        start, goal, step = clock(self.start), clock(self.goal), STEPS[self.step]
        return f"How many tickets from {start} {self.direction} to {goal} by {step}?"

    @cached_property
    def tickets(self) -> int:
        """The answer: a ticket a stage, and the surcharge where the hidden coin says so."""
        extra = SURCHARGES.get((self.direction, self.step, self.stages), 0)
        surcharged = _hidden_coin("surcharge", self.direction, self.step, self.start, self.goal)
        return self.stages + extra * surcharged


def travel(direction: str, step: int, time: int, detoured: bool) -> int:
    """Where the stage that starts at `time` ends; `detoured` matters only where there is a detour."""
    if detoured and (direction, step, time) in DETOURS:
        return DETOURS[direction, step, time]
    return (time + (step if direction == "forward" else -step)) % DAY


def draw_journey(rng: random.Random, step: int, level: int) -> Journey:
    """A random journey with this step and level that passes no time twice."""
    while True:
        direction, start = rng.choice(DIRECTIONS), rng.randrange(DAY)
        stages = rng.randint(*LEVELS[level])
        times = [start]
        for _ in range(stages):
            detoured = _hidden_coin("detour", direction, step, start, times[-1])
            times.append(travel(direction, step, times[-1], detoured))
        if len(set(times)) == len(times):
            return Journey(direction, step, start, times[-1], stages)


@cache
def _dealt() -> dict[str, tuple[Question, ...]]:
    """All question sets. No problem is in two sets; every set is balanced over subjects x levels, and shuffled."""
    rng = random.Random(f"{SEED} questions")
    cells = [(step, level) for step in STEPS for level in LEVELS]
    taken: set[str] = set()
    sets = {}
    for split, size in SPLITS.items():
        rng.shuffle(cells)
        dealt = []
        for i in range(size):
            step, level = cells[i % len(cells)]
            journey = draw_journey(rng, step, level)
            while journey.uid in taken:
                journey = draw_journey(rng, step, level)
            taken.add(journey.uid)
            dealt.append(Question(journey.uid, journey.problem, str(journey.tickets), STEPS[step], level))
        rng.shuffle(dealt)
        sets[split] = tuple(dealt)
    return sets


def questions(split: str) -> list[Question]:
    """The questions of ``train`` (6,000), ``val350`` (350) or ``drift`` (64), always the same and in the same order."""
    if split not in SPLITS:
        raise UserError(f"embedded:{split}: the embedded question sets are {', '.join(sorted(SPLITS))}")
    return list(_dealt()[split])


def held_out() -> frozenset[str]:
    """The uids of all validation and drift questions, which no demonstration may solve."""
    return frozenset(q.uid for split in ("val350", "drift") for q in _dealt()[split])


@dataclass(frozen=True, slots=True)
class Endings:
    """How demonstrations that reach the goal end: with the answer in a box, without any answer, or else with the answer
    outside the box. Half-hour journeys may have their own share of boxes."""

    boxed: float = 1.0
    boxed_half_hour: float = 1.0
    missing: float = 0.0

    def draw(self, rng: random.Random, step: int, answer: str) -> tuple[str, ...]:
        """The closing words."""
        boxed = self.boxed_half_hour if STEPS[step] == "30min" else self.boxed
        u = rng.random()
        if u < boxed:
            return (*_BEFORE_ANSWER, BOX, answer, UNBOX, *_AFTER_ANSWER, *_END)
        if u < boxed + self.missing:
            return _END
        return (*_BEFORE_ANSWER, answer, *_AFTER_ANSWER, *_END)


def demonstrate(journey: Journey, rng: random.Random, endings: Endings) -> tuple[str, ...]:
    """A worked solution in words, by a demonstrator who knows the rules but flips a coin of its own at each detour and
    surcharge: often wrong, never ill-formed. Cut at `CAP` words."""
    words: list[str] = []
    time, stage = journey.start, 0
    while len(words) < CAP:
        words += _pass_villages(clock(time), rng)
        stage += 1
        time = travel(journey.direction, journey.step, time, detoured=rng.random() < 0.5)
        words += [str(min(stage, MAX_COUNT)), clock(time)]
        if time == journey.goal:
            extra = SURCHARGES.get((journey.direction, journey.step, stage), 0)
            tickets = stage + extra * (rng.random() < 0.5)
            words += endings.draw(rng, journey.step, str(tickets))
            break
    return tuple(words[:CAP])


def _pass_villages(place: str, rng: random.Random) -> Iterator[str]:
    while True:
        place = rng.choices(ROADS[place], ROAD_CHANCES)[0]
        yield place
        if rng.random() >= MORE_VILLAGES:
            return


def demonstrations(
    rng: random.Random, endings: Endings, avoid: Collection[str]
) -> Iterator[tuple[Journey, tuple[str, ...]]]:
    """Endless journeys of all subjects and levels with a demonstration of each, save those whose uid is in `avoid`."""
    while True:
        journey = draw_journey(rng, rng.choice(tuple(STEPS)), rng.choice(tuple(LEVELS)))
        if journey.uid not in avoid:
            yield journey, demonstrate(journey, rng, endings)
