"""How a question becomes a prompt: a plain-text template, or the chat template of the model's tokenizer.

A policy folder carries its template as ``prompt_template.json``, so that training, evaluation and a later user of the
snapshot render the same prompt.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvr_pl.errors import UserError
from rlvr_pl.text_file import read_json
from rlvr_pl.types import Question

FILE_NAME = "prompt_template.json"
PLACEHOLDER = "{problem}"
ANSWER = "{answer}"
HINT = (
    "{problem}\n\nThe final result is {answer}. Explain step by step how it comes about, as if nobody had told "
    "you, and write it at the end."
)
"""The problem of a hinted prompt, which states the answer (rationalization)."""

# The prompt of the supplied recipe (`render_prompt` of the package reasoning-from-scratch 0.2.0), byte for byte: a
# policy trained with any other text could not be compared with it.
SUPPLIED_TEXT = (
    "You are a helpful math assistant.\nAnswer the question and write the final result on a new line as:\n"
    "\\boxed{ANSWER}\n\nQuestion:\n{problem}\n\nAnswer:"
)


class PromptTemplate(ABC):
    """Renders questions for one tokenizer. `name` is recorded with results; `hint` says how a problem is put when its
    answer is told, with ``{problem}`` and ``{answer}`` in it."""

    name: str
    hint: str

    @abstractmethod
    def render(self, question: Question) -> str:
        """The prompt as text, control tokens of a chat template included."""

    @abstractmethod
    def ids(self, question: Question) -> tuple[int, ...]:
        """The prompt as token ids. This is what a sampler continues; the rendered text is never tokenised again."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """What `make_template` needs to build it again: the content of ``prompt_template.json``."""

    def hinted(self, question: Question) -> Question:
        """The question put in such a way that its answer is told."""
        parts = {PLACEHOLDER: question.problem, ANSWER: question.answer}
        problem = re.sub(r"\{(?:problem|answer)\}", lambda m: parts[m.group()], self.hint)
        asked = max((i for i, m in enumerate(question.messages) if m["role"] == "user"), default=-1)
        told = [{**m, "content": problem} if i == asked else m for i, m in enumerate(question.messages)]
        return replace(question, problem=problem, messages=tuple(told))

    def to_folder(self, folder: Path) -> None:
        """Write ``prompt_template.json`` into `folder`."""
        text = json.dumps(self.spec(), ensure_ascii=False, indent=2) + "\n"
        (folder / FILE_NAME).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class TextTemplate(PromptTemplate):
    """Plain text in which ``{problem}`` stands for the problem, for base models.

    The tokenizer's own leading special token (Llama's BOS) is added unless the text already begins with it. A question
    of chat messages can be put this way only when it is a single user message.
    """

    tokenizer: Any
    text: str = SUPPLIED_TEXT
    name: str = "supplied"
    hint: str = HINT

    def render(self, question: Question) -> str:
        if len(question.messages) > 1 or any(m["role"] != "user" for m in question.messages):
            raise UserError(
                f"question {question.uid}: has {len(question.messages)} chat messages, which a template of kind text "
                "cannot put; set policy.template chat"
            )
        return self.text.replace(PLACEHOLDER, question.problem)

    def ids(self, question: Question) -> tuple[int, ...]:
        text, tokenizer = self.render(question), self.tokenizer
        has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        ids = list(tokenizer.encode(text, add_special_tokens=not has_bos))
        if not has_bos and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
            # Some tokenizers close every text with EOS; a prompt must stay open.
            plain = tokenizer.encode(text, add_special_tokens=False)
            ids = ids if plain and plain[-1] == ids[-1] else ids[:-1]
        return tuple(ids)

    def spec(self) -> dict[str, Any]:
        spec = {"kind": "text", "name": self.name, "text": self.text}
        return spec if self.hint == HINT else spec | {"hint": self.hint}


@dataclass(frozen=True)
class ChatTemplate(PromptTemplate):
    """The tokenizer's chat template: an optional system message, one user message, then the assistant's opening.

    `user` holds ``{problem}``, so that an instruction ("... in \\boxed{}") can surround the problem. `arguments` are
    handed to the template (for example ``{"enable_thinking": False}``).

    A question that is chat messages is put as it is, without `user`; `system` comes before it unless it has a system
    message of its own. A conversation that ends with the assistant's words is continued after them.
    """

    tokenizer: Any
    system: str | None = None
    user: str = PLACEHOLDER
    arguments: Mapping[str, Any] | None = None
    name: str = "chat"
    hint: str = HINT

    def render(self, question: Question) -> str:
        return self._apply(question, tokenize=False)

    def ids(self, question: Question) -> tuple[int, ...]:
        # The template's text holds every control token that belongs there: nothing may be added to it.
        return tuple(self._apply(question, tokenize=True, return_dict=False))

    def spec(self) -> dict[str, Any]:
        optional = {"system": self.system, "arguments": dict(self.arguments) if self.arguments else None}
        optional["hint"] = None if self.hint == HINT else self.hint
        spec = {"kind": "chat", "name": self.name, "user": self.user}
        return spec | {key: value for key, value in optional.items() if value is not None}

    def _apply(self, question: Question, **how: Any) -> Any:
        messages = [dict(m) for m in question.messages]
        if not messages:
            messages = [{"role": "user", "content": self.user.replace(PLACEHOLDER, question.problem)}]
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        begun = messages[-1]["role"] == "assistant"
        how |= {"continue_final_message": True} if begun else {"add_generation_prompt": True}
        return self.tokenizer.apply_chat_template(messages, **how, **dict(self.arguments or {}))


def make_template(spec: str | Mapping[str, Any], tokenizer: Any, where: str = "prompt template") -> PromptTemplate:
    """Build a template for `tokenizer`.

    `spec` is ``"supplied"``, ``"chat"``, a text that holds ``{problem}``, or a mapping with ``kind: text`` (``text``,
    ``name``) or ``kind: chat`` (``system``, ``user``, ``arguments``, ``name``); both take a ``hint``. `where` opens the
    error messages.
    """
    if isinstance(spec, str):
        return make_template(_named(spec, where), tokenizer, where)
    fields = dict(spec)
    kind = fields.pop("kind", None)
    allowed = {"text": {"text", "name", "hint"}, "chat": {"system", "user", "arguments", "name", "hint"}}.get(str(kind))
    if allowed is None:
        raise UserError(f"{where}: kind is {kind!r}; it must be 'text' or 'chat'")
    if unknown := sorted(map(str, set(fields) - allowed)):
        raise UserError(f"{where}: unknown {', '.join(unknown)}; kind {kind} knows {', '.join(sorted(allowed))}")
    for key, value in fields.items():
        wanted = Mapping if key == "arguments" else str
        if value is not None and not isinstance(value, wanted):
            raise UserError(f"{where}: {key} must be {'a mapping' if wanted is Mapping else 'text'}, not {value!r}")
    fields = {key: value for key, value in fields.items() if value is not None}
    if kind == "text":
        fields.setdefault("name", "supplied" if fields.get("text", SUPPLIED_TEXT) == SUPPLIED_TEXT else "text")
    elif not getattr(tokenizer, "chat_template", None):
        raise UserError(f"{where}: kind is chat, but the tokenizer has no chat template; use kind text")
    template = TextTemplate(tokenizer, **fields) if kind == "text" else ChatTemplate(tokenizer, **fields)
    body = template.text if isinstance(template, TextTemplate) else template.user
    if PLACEHOLDER not in body:
        raise UserError(f"{where}: the text must hold {PLACEHOLDER}, where the problem goes; got {body[:80]!r}")
    if PLACEHOLDER not in template.hint or ANSWER not in template.hint:
        raise UserError(f"{where}: the hint must hold {PLACEHOLDER} and {ANSWER}; got {template.hint[:80]!r}")
    return template


def template_of_folder(folder: Path, tokenizer: Any) -> PromptTemplate:
    """The template that a model folder asks for: its ``prompt_template.json``, else its tokenizer's chat template,
    else the supplied recipe's text."""
    path = folder / FILE_NAME
    if not os.path.lexists(path):
        return make_template("chat" if getattr(tokenizer, "chat_template", None) else "supplied", tokenizer)
    spec = read_json(path, byte_order_mark=False)
    if not isinstance(spec, dict):
        raise UserError(f"{path}: must be a JSON object with kind 'text' or 'chat'")
    return make_template(spec, tokenizer, str(path))


def _named(spec: str, where: str) -> dict[str, Any]:
    if spec in ("supplied", "chat"):
        return {"kind": "text" if spec == "supplied" else "chat"}
    if PLACEHOLDER in spec:
        return {"kind": "text", "text": spec}
    raise UserError(f"{where}: {spec[:80]!r} is neither 'supplied' nor 'chat' nor a text that holds {PLACEHOLDER}")
