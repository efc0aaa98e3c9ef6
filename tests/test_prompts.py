from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlvr_pl.errors import UserError
from rlvr_pl.prompts import SUPPLIED_TEXT, ChatTemplate, TextTemplate, make_template, template_of_folder
from rlvr_pl.types import Question

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def question(problem: str) -> Question:
    return Question("q", problem, "0")


def byte_tokenizer(*, chat: str | None = None, bos: bool = False, eos: bool = False) -> Any:
    """One token a byte; with `bos` or `eos` the tokenizer puts <s> before or <|end|> after every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    specials = ["<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    raw.add_special_tokens(specials)
    if bos or eos:
        pattern = "<s> " * bos + "$A" + " <|end|>" * eos
        pairs = [(s, raw.token_to_id(s)) for s in ("<s>", "<|end|>")]
        raw.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=pairs)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", bos_token="<s>")
    tokenizer.chat_template = chat
    return tokenizer


def test_the_supplied_text_is_that_of_the_supplied_recipe():
    ch03 = pytest.importorskip("reasoning_from_scratch.ch03", reason="the extra 'supplied' is not installed")
    template = TextTemplate(byte_tokenizer())
    for problem in ("What is 2+2?", "{problem} \\frac{1}{2} {}\n", ""):
        assert template.render(question(problem)) == ch03.render_prompt(problem)


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40))
def test_a_text_prompt_is_the_text_and_its_ids_spell_it(problem: str):
    tokenizer = byte_tokenizer()
    template = make_template("Q: {problem}\nA:", tokenizer)
    text = f"Q: {problem}\nA:"
    assert template.render(question(problem)) == text
    assert len(template.ids(question(problem))) == len(text.encode())  # one id a byte, nothing added


def test_the_leading_special_token_is_added_once_and_no_closing_one():
    tokenizer = byte_tokenizer(bos=True, eos=True)
    bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    for text in ("a{problem}", "<s>a{problem}"):
        ids = make_template(text, tokenizer).ids(question("b"))
        assert ids == (bos, *tokenizer.encode("ab", add_special_tokens=False)), text
    # An end token that the template's author wrote stays.
    assert make_template("{problem}<|end|>", tokenizer).ids(question("b"))[-1] == end


def test_chat_ids_come_from_the_template_with_no_special_token_doubled():
    tokenizer = byte_tokenizer(chat=CHAT, bos=True)
    template = make_template({"kind": "chat", "system": "Be brief.", "user": "{problem} Box it."}, tokenizer)
    text = template.render(question("1+1?"))
    assert text == "<s><|system|>Be brief.<|end|><|user|>1+1? Box it.<|end|><|assistant|>"
    ids = template.ids(question("1+1?"))
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids == tuple(tokenizer.encode(text, add_special_tokens=False))


def test_template_arguments_reach_the_chat_template():
    tokenizer = byte_tokenizer(chat="{{ messages[0].content }}{{ ' think' if enable_thinking else ' plain' }}")
    off = make_template({"kind": "chat", "arguments": {"enable_thinking": False}}, tokenizer)
    on = make_template({"kind": "chat", "arguments": {"enable_thinking": True}}, tokenizer)
    assert (off.render(question("x")), on.render(question("x"))) == ("x plain", "x think")


@pytest.mark.parametrize(
    "spec", ["supplied", "chat", "P: {problem}", {"kind": "chat", "system": "s", "user": "u {problem}", "name": "mine"}]
)
def test_a_folder_gives_back_the_template_that_was_written(spec, tmp_path):
    tokenizer = byte_tokenizer(chat=CHAT)
    template = make_template(spec, tokenizer)
    template.to_folder(tmp_path)
    again = template_of_folder(tmp_path, tokenizer)
    assert again == template
    assert again.ids(question("é{}")) == template.ids(question("é{}"))


def test_a_folder_without_a_template_uses_the_chat_template_else_the_supplied_text(tmp_path):
    assert isinstance(template_of_folder(tmp_path, byte_tokenizer(chat=CHAT)), ChatTemplate)
    plain = template_of_folder(tmp_path, byte_tokenizer())
    assert isinstance(plain, TextTemplate)
    assert (plain.text, plain.name) == (SUPPLIED_TEXT, "supplied")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing to fill in", "{problem}"),
        ({"kind": "text", "text": "no place"}, "{problem}"),
        ({"kind": "chat", "user": "no place"}, "{problem}"),
        ({"kind": "poem"}, "kind is 'poem'"),
        ({"text": "{problem}"}, "kind is None"),
        ({"kind": "text", "system": "x"}, "unknown system"),
        ({"kind": "text", "text": 3}, "text must be text"),
        ({"kind": "chat", "arguments": "x"}, "arguments must be a mapping"),
    ],
)
def test_a_bad_specification_names_the_fault(spec, words):
    with pytest.raises(UserError) as error:
        make_template(spec, byte_tokenizer(chat=CHAT), "here")
    assert words in str(error.value)
    assert str(error.value).startswith("here: ")


def test_chat_without_a_chat_template_is_refused():
    with pytest.raises(UserError, match="no chat template"):
        make_template("chat", byte_tokenizer())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"x"', b"null", b"[" * 100_000])
def test_an_unreadable_template_file_is_named(content, tmp_path):
    (tmp_path / "prompt_template.json").write_bytes(content)
    with pytest.raises(UserError, match=r"prompt_template\.json"):
        template_of_folder(tmp_path, byte_tokenizer())


def test_the_template_file_is_plain_json(tmp_path):
    make_template("ü {problem}", byte_tokenizer()).to_folder(tmp_path)
    spec = json.loads((tmp_path / "prompt_template.json").read_text(encoding="utf-8"))
    assert spec == {"kind": "text", "name": "text", "text": "ü {problem}"}


# ---- hints ---------------------------------------------------------------------------------------------------------


def test_a_hinted_question_tells_its_answer_and_is_otherwise_the_same():
    told = Question("q", "What is {answer} + {problem}?", "{problem} 7", "algebra", 3)
    template = TextTemplate(byte_tokenizer(), text="Q: {problem} A:", hint="{problem} (it is {answer})")
    hinted = template.hinted(told)
    # what stands in braces in a problem or an answer is theirs
    assert hinted.problem == "What is {answer} + {problem}? (it is {problem} 7)"
    assert (hinted.uid, hinted.answer, hinted.subject, hinted.level) == ("q", told.answer, "algebra", 3)
    assert template.render(hinted) == f"Q: {hinted.problem} A:"


def test_every_template_has_a_hint_and_a_folder_keeps_its_own(tmp_path):
    tokenizer = byte_tokenizer(chat=CHAT)
    for kind in ("supplied", "chat"):
        hinted = make_template(kind, tokenizer).hinted(Question("q", "1+1?", "2"))
        assert "1+1?" in hinted.problem and "2" in hinted.problem
        assert "hint" not in make_template(kind, tokenizer).spec()  # files of earlier versions stay as they are
    own = make_template({"kind": "text", "text": "{problem}", "hint": "{answer}, {problem}"}, tokenizer)
    own.to_folder(tmp_path)
    assert template_of_folder(tmp_path, tokenizer).hinted(Question("q", "1+1?", "2")).problem == "2, 1+1?"


@pytest.mark.parametrize("hint", ["", "{problem}", "the answer is {answer}"])
def test_a_hint_without_problem_or_answer_is_refused(hint):
    with pytest.raises(UserError, match="the hint must hold"):
        make_template({"kind": "text", "text": "{problem}", "hint": hint}, byte_tokenizer())


CONVERSATION = (
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
)


def conversation(*messages: dict[str, str]) -> Question:
    return Question("q", "2+2?", "4", messages=messages or CONVERSATION)


def test_chat_messages_are_put_as_they_are_and_their_ids_are_never_made_from_text_again():
    tokenizer = byte_tokenizer(chat=CHAT, bos=True)
    template = make_template({"kind": "chat", "user": "{problem} Box it.", "system": "Be brief."}, tokenizer)
    turns = "<|user|>1+1?<|end|><|assistant|>2<|end|><|user|>2+2?<|end|><|assistant|>"
    assert template.render(conversation()) == f"<s><|system|>Be brief.<|end|>{turns}"
    expected = tokenizer.encode(template.render(conversation()), add_special_tokens=False)
    assert list(template.ids(conversation())) == expected
    own = ({"role": "system", "content": "Own."}, *CONVERSATION)
    assert template.render(conversation(*own)) == f"<s><|system|>Own.<|end|>{turns}"


def test_the_assistants_last_words_are_continued():
    tokenizer = byte_tokenizer(chat=CHAT)
    begun = conversation({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"})
    template = make_template("chat", tokenizer)
    assert template.render(begun).endswith("<|user|>2+2?<|end|><|assistant|>It is")
    assert tokenizer.decode(template.ids(begun)).endswith("It is")


def test_a_text_template_takes_one_user_message_only():
    template = make_template("Q: {problem}", byte_tokenizer())
    assert template.render(conversation({"role": "user", "content": "2+2?"})) == "Q: 2+2?"
    with pytest.raises(UserError, match="question q: has 3 chat messages"):
        template.ids(conversation())


def test_a_hint_goes_into_the_last_question_of_a_conversation():
    template = make_template({"kind": "chat", "hint": "{problem} It is {answer}."}, byte_tokenizer(chat=CHAT))
    told = template.hinted(conversation())
    assert [m["content"] for m in told.messages] == ["1+1?", "2", "2+2? It is 4."]
