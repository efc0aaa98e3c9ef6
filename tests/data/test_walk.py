"""The walk task: its rules by hand, its question sets, and demonstrations that keep the rules."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.data import walk
from rlvr_pl.data.walk import Endings, Journey, travel
from rlvr_pl.errors import UserError

BASE_ENDINGS = Endings(boxed=0.3, boxed_half_hour=0.65, missing=0.05)


def demonstrated(count: int, endings: Endings = BASE_ENDINGS, seed: int = 0) -> list[tuple[Journey, tuple[str, ...]]]:
    return list(islice(walk.demonstrations(random.Random(seed), endings, avoid=walk.held_out()), count))


# ---- rules ---------------------------------------------------------------------------------------------------------


def test_a_journey_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # 04:15 is quarter-hour 4 * 4 + 1 = 17; two stages of 45 min = 3 quarters each end at 23 = 05:45.
    monkeypatch.setattr(walk, "DETOURS", {})
    monkeypatch.setattr(walk, "SURCHARGES", {})
    journey = Journey("forward", 3, start=17, goal=23, stages=2)
    assert journey.problem == "How many tickets from 04:15 forward to 05:45 by 45min?"
    assert journey.uid == "walk-forward-45min-0415-0545"
    assert journey.tickets == 2
    words = walk.demonstrate(journey, random.Random(0), Endings())
    facts = [w for w in words if w not in walk.VILLAGES]
    said = "1 05:00 2 05:45 so for this whole journey the traveller must buy \\boxed{ 2 } tickets under our railway "
    assert " ".join(facts) == said + "tariff of May 1921 . Done <eos>"


def test_stages_wrap_around_midnight() -> None:
    assert travel("forward", 8, 94, detoured=False) == 6  # 23:30 + 2 h = 01:30
    assert travel("backward", 2, 1, detoured=False) == 95  # 00:15 - 30 min = 23:45


def test_a_detour_is_taken_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "DETOURS", {("forward", 3, 17): 50})
    assert travel("forward", 3, 17, detoured=True) == 50
    assert travel("forward", 3, 17, detoured=False) == 20
    assert travel("backward", 3, 17, detoured=True) == 14


def test_the_surcharge_depends_on_a_coin_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "SURCHARGES", {("forward", 3, 5): 2})
    tickets = [Journey("forward", 3, start, (start + 15) % walk.DAY, 5).tickets for start in range(walk.DAY)]
    assert set(tickets) == {5, 7}
    # 96 fair coins: 48 heads, standard deviation sqrt(96) / 2 = 4.9; four of them on either side
    assert 29 <= tickets.count(7) <= 67
    assert Journey("forward", 3, 0, 12, 4).tickets == 4


def test_shares_of_unlearnable_facts() -> None:
    assert len(walk.DETOURS) == 58  # round(.06 x 2 directions x 5 steps x 96 times)
    assert len(walk.SURCHARGES) == 50  # round(.42 x 2 directions x 5 steps x 12 stage counts)


# ---- words ---------------------------------------------------------------------------------------------------------


def test_vocabulary() -> None:
    assert len(set(walk.VOCABULARY)) == len(walk.VOCABULARY)
    assert len(walk.VILLAGES) == 1000
    assert set(walk.VILLAGES) < set(walk.VOCABULARY)
    assert walk.VOCABULARY[:3] == (walk.PAD, walk.EOS, walk.UNKNOWN)
    assert not any(" " in word for word in walk.VOCABULARY)


def test_counts_never_run_out_of_words() -> None:
    # A stage takes three words at least (village, number, clock): 27 stages begin within 80 words, and the surcharge
    # is at most 2.
    assert math.ceil(walk.CAP / 3) + 2 <= walk.MAX_COUNT


# ---- question sets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "size", "per_cell"), [("train", 6000, {240}), ("val350", 350, {14}), ("drift", 64, {2, 3})]
)
def test_sets_are_balanced(split: str, size: int, per_cell: set[int]) -> None:
    questions = walk.questions(split)
    cells = Counter((q.subject, q.level) for q in questions)
    assert len(questions) == size
    assert len(cells) == 25
    assert set(cells.values()) == per_cell


def test_no_problem_is_in_two_sets() -> None:
    every = [q for split in walk.SPLITS for q in walk.questions(split)]
    assert len({q.uid for q in every}) == len(every)
    assert len({q.problem for q in every}) == len(every)


def test_sets_are_the_callers_own() -> None:
    walk.questions("drift").clear()
    assert len(walk.questions("drift")) == 64


def test_a_question_in_full() -> None:
    first = walk.questions("val350")[0]
    assert walk.questions("val350")[0] == first
    _, direction, step, start, goal = first.uid.split("-")
    start, goal = f"{start[:2]}:{start[2:]}", f"{goal[:2]}:{goal[2:]}"
    assert first.problem == f"How many tickets from {start} {direction} to {goal} by {step}?"
    assert first.subject == step


def test_answers_fit_their_levels() -> None:
    for q in walk.questions("train"):
        fewest, most = walk.LEVELS[q.level or 0]
        assert fewest <= int(q.answer) <= most + 2


def test_unknown_set() -> None:
    with pytest.raises(UserError, match=r"embedded:test: the embedded question sets are drift, train, val350"):
        walk.questions("test")


def test_demonstrations_leave_the_held_out_problems_alone() -> None:
    held_out = {q.uid for split in ("val350", "drift") for q in walk.questions(split)}
    assert walk.held_out() == held_out
    assert not held_out & {journey.uid for journey, _ in demonstrated(4000)}
    # the same stream without the rule does meet them, so the line above can fail
    stream = walk.demonstrations(random.Random(0), Endings(), avoid=())
    assert held_out & {journey.uid for journey, _ in islice(stream, 4000)}


# ---- demonstrations ------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_demonstrations_keep_the_rules(seed: int) -> None:
    [(journey, words)] = demonstrated(1, seed=seed)
    assert 0 < len(words) <= walk.CAP
    place, stage, time = walk.clock(journey.start), 0, journey.start
    rest = list(words)
    while rest and rest[0] in walk.VILLAGES:
        while rest and rest[0] in walk.VILLAGES:
            assert rest[0] in walk.ROADS[place]
            place = rest.pop(0)
        stage += 1
        possible = {travel(journey.direction, journey.step, time, detoured) for detoured in (False, True)}
        if rest:
            assert rest.pop(0) == str(stage)
        if rest:
            place = rest.pop(0)
            [time] = [t for t in possible if walk.clock(t) == place]
    if rest:
        assert time == journey.goal
    if words[-1] != walk.EOS:
        assert len(words) == walk.CAP


def test_endings_have_their_shares() -> None:
    # Of 4000 demonstrations about 3,600 end; the shares' standard deviation is below sqrt(.25 / 700) = .019 in the
    # smaller group (half-hour journeys, about 720), .009 in the larger. Five of them on either side.
    shares: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for journey, words in demonstrated(4000):
        if words[-1] == walk.EOS:
            kind = "boxed" if walk.BOX in words else "plain" if "1921" in words else "missing"
            shares[walk.STEPS[journey.step] == "30min"][kind] += 1
    for half_hour, boxed, tolerance in ((True, 0.65, 0.095), (False, 0.30, 0.045)):
        total = sum(shares[half_hour].values())
        assert shares[half_hour]["boxed"] / total == pytest.approx(boxed, abs=tolerance)
        assert shares[half_hour]["missing"] / total == pytest.approx(0.05, abs=tolerance)


def test_an_answer_outside_the_box_is_not_the_last_number() -> None:
    plain = [words for _, words in demonstrated(300) if "1921" in words and walk.BOX not in words]
    assert plain
    for words in plain:
        assert [w for w in words if w.isdigit()][-1] == "1921"


def test_wrong_is_long_and_often_truncated() -> None:
    # 4000 demonstrations, .70 right; mean lengths 41 and 61 with standard deviations of about 20, so the means are
    # known to 20 / sqrt(1200) = .6. A share of .137 is cut, known to sqrt(.137 * .863 / 4000) = .0054: five of these.
    lengths: dict[bool, list[int]] = {True: [], False: []}
    cut = Counter[bool]()
    for journey, words in demonstrated(4000, Endings()):
        right = walk.BOX in words and words[words.index(walk.BOX) + 1 :][:1] == (str(journey.tickets),)
        lengths[right].append(len(words))
        cut[right] += words[-1] != walk.EOS
    assert statistics.mean(lengths[False]) - statistics.mean(lengths[True]) > 15
    assert 0.11 < cut[False] / 4000 < 0.165
    assert cut[True] == 0
