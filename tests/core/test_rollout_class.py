"""Loops and soup: seen where they are, and not seen in any ordinary text, wherever the cap cuts it."""

from __future__ import annotations

import itertools
import json
import random
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_pl.core.rollout_class import (
    SURPRISE,
    Diagnosis,
    classify,
    diagnose,
    has_distinct_words,
    has_odd_characters,
    is_incompressible,
    loop_period,
)
from rlvr_pl.types import RolloutClass, StopReason

ROOT = Path(__file__).resolve().parents[2]

CHINESE = """设甲乙两地相距三百公里，一辆汽车以每小时六十公里的速度从甲地开往乙地，另一辆汽车同时以每小时四十公
里的速度从乙地开往甲地。我们要求的是两车相遇所需要的时间。因为两车相向而行，所以它们的距离每小时缩短一百公里，也就是
两车速度之和。用总路程除以速度之和，就得到相遇的时间：$300 \\div (60+40) = 3$，因此两车在出发三小时以后相遇。接下来
检验这个答案是否合理。三小时之内，第一辆车行驶了一百八十公里，第二辆车行驶了一百二十公里，两段路程加起来正好等于三百
公里，与题目所给的条件完全一致。如果第二辆车晚出发半小时，情况就会有所不同，那时第一辆车已经先走了三十公里，剩下的二
百七十公里由两辆车共同走完，需要两小时四十二分钟。由此可见，出发时间的先后会影响相遇的地点。最后请注意，速度的单位必
须统一，时间的单位也必须统一，否则计算结果就没有意义。综上所述，本题的答案是三小时。同学们在解题的时候，应当先画出示
意图，再列出方程，然后求解，并且养成检验的习惯，这样才能保证答案的正确。"""

JAPANESE = """直角三角形の斜辺の長さを求める問題を考えます。二つの辺の長さがそれぞれ三センチと四センチであるとき
、三平方の定理を使うと、斜辺の二乗は九と十六の和に等しくなります。したがって、斜辺の長さは五センチです。この定理は古
くから知られていて、測量や建築の現場で今でも使われています。次に、面積を計算してみましょう。底辺に高さを掛けて二で割
ればよいので、三かける四わる二で六平方センチになります。ここで大切なのは、どの角が直角であるかを最初に確かめることで
す。もし直角の位置を間違えると、斜辺ではない辺を斜辺だと思い込んでしまい、答えも間違ってしまいます。"""

KOREAN = """어떤 수에 칠을 더한 다음 두 배를 하면 삼십이 된다고 합니다. 이 수를 구하기 위해 모르는 수를 엑스라
고 두겠습니다. 그러면 엑스 더하기 칠의 두 배가 삼십이므로, 양변을 이로 나누면 엑스 더하기 칠은 십오가 됩니다. 따라서
 엑스는 팔입니다. 답이 맞는지 확인해 봅시다. 팔에 칠을 더하면 십오이고, 십오의 두 배는 삼십이므로 조건을 만족합니다.
 이런 문제를 풀 때에는 식을 세우는 과정이 가장 중요하며, 계산은 그다음입니다. 식을 잘못 세우면 아무리 계산을 잘해도 
소용이 없습니다."""


def numeric_texts() -> list[str]:
    rng = random.Random(0)
    return [
        "".join(rng.choice(string.digits) for _ in range(1500)),
        ", ".join(str(i) for i in range(1, 400)),
        "\n".join(f"{i}^2 = {i * i}" for i in range(1, 150)),
        "\n".join(f"x_{{{i}}} = {100 * rng.random():.6f}" for i in range(80)),
        "\n".join(" & ".join(str(rng.randint(0, 99)) for _ in range(8)) + r" \\" for _ in range(60)),
        "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706",
    ]


def cuts(text: str, count: int, seed: int) -> list[str]:
    """The whole text and `count` prefixes: where a cap might have cut it."""
    rng = random.Random(seed)
    return [text, *(text[: rng.randint(1, len(text))] for _ in range(count))]


def false_alarms(texts: list[str], count: int = 20) -> list[tuple[Diagnosis, str]]:
    found = [(diagnose(cut, "length"), cut[-80:]) for i, t in enumerate(texts) for cut in cuts(t, count, i)]
    return [(d, end) for d, end in found if d != Diagnosis(RolloutClass.TRUNCATED)]


def test_reference_solutions_raise_no_alarm(shared):
    """All 12,000 reference solutions, whole and cut at a random place."""
    lines = (shared / "data" / "math_train_12000_solutions.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["solution"] for line in lines]
    assert len(solutions) == 12000
    assert not false_alarms(solutions, count=1)


@pytest.mark.parametrize("text", [CHINESE, JAPANESE, KOREAN], ids=["chinese", "japanese", "korean"])
def test_east_asian_text_raises_no_alarm(text):
    assert not false_alarms([text], count=200)


def test_numbers_raise_no_alarm():
    assert not false_alarms(numeric_texts(), count=50)


def test_english_and_code_raise_no_alarm():
    sources = [ROOT / "LICENSE", *sorted((ROOT / "rlvr_pl").glob("*.py")), *sorted((ROOT / "docs").glob("*.md"))]
    sources += [Path(m.__file__) for m in (json, random, string) if m.__file__]
    assert not false_alarms([p.read_text(encoding="utf-8") for p in sources], count=30)


def test_the_sampler_decides_what_ended():
    loop = "and so on " * 100
    assert classify(loop, StopReason.EOS) is RolloutClass.EOS
    assert classify(loop, "eos") is RolloutClass.EOS
    assert classify(loop, "length") is RolloutClass.LOOP
    assert classify("a short answer, cut", StopReason.LENGTH) is RolloutClass.TRUNCATED
    assert classify("", "length") is RolloutClass.TRUNCATED
    with pytest.raises(ValueError):
        classify("text", "stop")


VOCABULARY = (
    " the", " of", " x", "=", " \\frac{1}{2}", " sum", "0", "\n", " 数", " therefore", ",", " $n$", " +", "ing", " Δ",
)  # fmt: skip


@pytest.mark.parametrize("total", [512, 1024])
def test_periods_of_1_to_200_tokens_are_loops(total):
    """A block of 1-200 tokens repeated to the cap after an ordinary beginning, cut in mid-block."""
    rng = random.Random(total)
    for period in range(1, 201):
        block = rng.choices(VOCABULARY, k=period)
        tokens = list(itertools.islice(itertools.cycle(block), total))
        text = "We begin with the first case. " + "".join(tokens)
        assert diagnose(text, "length") == Diagnosis(RolloutClass.LOOP, "periodic-tail"), (period, text[:200])


def test_loop_thresholds():
    block = "".join(random.Random(1).choices(string.ascii_lowercase + " ", k=100))
    assert loop_period(block * 2) is None  # 2 copies, 200 characters: fewer than 2.5 copies, fewer than 600 characters
    assert loop_period(block * 2 + block[:49]) is None
    assert loop_period(block * 2 + block[:50]) == 100  # 2.5 copies, 250 characters
    assert loop_period("ab" * 79) is None  # 158 characters
    assert loop_period("ab" * 80) == 2  # 160
    long = "".join(random.Random(2).choices(string.ascii_lowercase + " ", k=300))
    assert loop_period(long * 2) == 300  # two copies, 600 characters
    assert loop_period(long[1:] * 2) is None  # two copies, 598 characters
    assert loop_period("ab" * 80 + " and then it went on") is None  # what repeats must be the end


def plain_loop_period(text: str) -> int | None:
    """The rule as it is stated, every period tried."""
    for p in range(1, len(text)):
        span = p
        while span < len(text) and text[-span - 1] == text[-span - 1 + p]:
            span += 1
        if (span >= 2.5 * p and span >= 160) or (span >= 2 * p and span >= 600):
            return p
    return None


@given(st.text(alphabet="ab", max_size=40), st.integers(1, 320), st.integers(90, 800), st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_loop_period_is_the_rule_as_stated(head, period, length, seed):
    block = "".join(random.Random(seed).choices("ab", k=period))
    text = head + (block * (length // period + 1))[:length]
    assert loop_period(text) == plain_loop_period(text)


def multilingual_soup(rng: random.Random, tokens: int) -> str:
    """Tokens drawn evenly from a vocabulary of many scripts, as a flat distribution over a model's vocabulary gives."""
    pieces = [
        lambda: rng.choice(["", " "]) + "".join(rng.choices(string.ascii_letters, k=rng.randint(2, 8))),
        lambda: "".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(rng.randint(1, 3))),
        lambda: "".join(chr(rng.randint(0x430, 0x44F)) for _ in range(rng.randint(2, 7))),
        lambda: "".join(chr(rng.randint(0x621, 0x64A)) for _ in range(rng.randint(2, 5))),
        lambda: "".join(chr(rng.randint(0xAC00, 0xD7A3)) for _ in range(rng.randint(1, 3))),
        lambda: rng.choice(["});", "=>", "//", "</", "\n", "...", "$", "%", "_", "++"]),
    ]
    return "".join(rng.choice(pieces)() for _ in range(tokens))


def test_random_tokens_are_soup():
    rng = random.Random(3)
    for tokens in (256, 512, 1024):
        for _ in range(20):
            assert classify(multilingual_soup(rng, tokens), "length") is RolloutClass.SOUP


@pytest.mark.parametrize(
    ("draw", "detector"),
    [
        (lambda rng: bytes(rng.randrange(256) for _ in range(1500)).decode("utf-8", "replace"), "odd-characters"),
        (lambda rng: "".join(chr(rng.randint(0xE000, 0xF8FF)) for _ in range(400)), "odd-characters"),
        (lambda rng: "".join(rng.choices(string.printable[:95], k=2500)), "incompressible"),
        (lambda rng: "".join(rng.choices(string.ascii_letters + string.digits, k=2500)), "incompressible"),
        (lambda rng: "".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(800)), "incompressible"),
        (lambda rng: "".join(rng.choices(string.ascii_lowercase + "  ", k=2500)), "distinct-words"),
    ],
    ids=["bytes", "private-use", "ascii", "alphanumeric", "hanzi", "lower-case"],
)
def test_kinds_of_soup_and_who_speaks(draw, detector):
    for seed in range(10):
        assert diagnose(draw(random.Random(seed)), "length") == Diagnosis(RolloutClass.SOUP, detector)


def test_odd_character_threshold():
    assert has_odd_characters("x" * 45 + "\ufffd" * 5)  # 5 of 50
    assert not has_odd_characters("x" * 46 + "\ufffd" * 5)  # 5 of 51 is 9.8%
    assert not has_odd_characters("\ufffd" * 49)  # under 50 characters
    assert not has_odd_characters("\t\n" * 50)


def test_deflate_threshold_falls_with_length():
    rng = random.Random(4)
    noise = "".join(rng.choices(string.printable[:95], k=3000))  # deflates to about 0.85
    assert not is_incompressible(noise[:999])
    assert is_incompressible(noise[:1000])
    # 4 bits a character deflate to a little over one half: below the limit at any length
    assert not is_incompressible("".join(rng.choices("0123456789abcdef", k=3000)))
    # only the end is read: 2,000 bytes of noise after any amount of text
    assert is_incompressible("the same words again " * 500 + noise[:2000])


def test_distinct_word_threshold():
    def words(distinct: int, repeated: int) -> str:
        made = [f"{a}{b}{c}" for a, b, c in itertools.product(string.ascii_lowercase, repeat=3)][:distinct]
        return " ".join(made + made[:repeated])

    assert has_distinct_words(words(92, 8))  # 92 distinct of 100
    assert not has_distinct_words(words(91, 9))
    assert has_distinct_words(words(59, 1))  # 59 of 60 is 98.3%
    assert not has_distinct_words(words(58, 2))  # 96.7%
    assert not has_distinct_words(words(59, 0))  # under 60 words
    assert has_distinct_words("同" * 300 + words(200, 0))  # the last 200 words
    assert not has_distinct_words("一二三四五六七八九十" * 10)  # characters count as words where no spaces are written


def test_surprise_speaks_last_and_only_of_what_was_cut_off():
    text = "an ordinary sentence, cut off here"
    soup = Diagnosis(RolloutClass.SOUP, "surprise")
    assert diagnose(text, "length", surprise=SURPRISE + 0.01) == soup
    assert diagnose(text, "length", surprise=SURPRISE) == Diagnosis(RolloutClass.TRUNCATED)
    assert diagnose(text, "length", surprise=2.0, max_surprise=1.5) == soup
    assert diagnose(text, "eos", surprise=99.0) == Diagnosis(RolloutClass.EOS)
    assert diagnose("loop " * 60, "length", surprise=99.0).detector == "periodic-tail"


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_any_text_gets_a_class(text):
    assert classify(text, "length") in set(RolloutClass) - {RolloutClass.EOS}


def test_lone_surrogates_and_cut_characters():
    assert classify("\ud800" * 20, "length") is RolloutClass.TRUNCATED
    assert classify("数学" * 100 + "\ufffd", "length") is RolloutClass.LOOP  # cut inside a character
