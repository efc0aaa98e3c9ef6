"""Makes the embedded base policy: a tiny Qwen3 that imitates demonstrations of the walk task, from nothing.

Two stages. The first teaches the task with every answer boxed; the second teaches the habit of a base model, to leave
most answers outside the box. What reinforcement learning then finds quickly is the box: the skill is already there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rlvr_pl.data import walk
from rlvr_pl.model_weights import cast_weights, weights_sha256
from rlvr_pl.policy import Policy
from rlvr_pl.prompts import TextTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MAX_CONTEXT = 512
BATCH_TOKENS = 2048
"""Padded tokens of prompts and completions in one step."""
POOL = 512
"""Demonstrations that are sorted by length and cut into steps together."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of imitation: steps of AdamW, peak learning rate, seed of the demonstrations, how these end."""

    steps: int
    lr: float
    seed: int
    endings: walk.Endings


STAGES = (
    Stage(800, 3e-3, 1, walk.Endings()),
    Stage(200, 1e-3, 5, walk.Endings(boxed=0.3, boxed_half_hour=0.65, missing=0.05)),
)


def make_base(
    stages: tuple[Stage, ...] = STAGES, *, seed: int = 1, progress: Callable[[float], None] | None = None
) -> Policy:
    """Train the base policy and return it in BF16. The same numbers on the same machine at the same thread count.

    Args:
        stages: what is learned, in order.
        seed: of the initial weights.
        progress: told the loss (nats a token) of every step.
    """
    policy = untrained_policy(seed)
    for stage in stages:
        imitate(policy.model, stage, progress)
    cast_weights(policy.model, torch.bfloat16)
    return replace(policy, sha256=weights_sha256(policy.model))


def untrained_policy(seed: int) -> Policy:
    """The policy with random FP32 weights: Qwen3 with untied embeddings, hidden 64, 2 layers, 4 query and 2 key heads.

    Heads have 32 dimensions, the fewest that vLLM's attention on CPUs knows.
    """
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    ids: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(
        vocab_size=len(walk.VOCABULARY),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).eval()
    model.generation_config = GenerationConfig(max_new_tokens=walk.CAP, **ids)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        template=TextTemplate(tokenizer, text="{problem}", name="walk", hint=walk.HINT),
        eos_ids=(ids["eos_token_id"],),
        pad_id=ids["pad_token_id"],
        max_context=MAX_CONTEXT,
        default_max_new_tokens=walk.CAP,
        name="untrained",
        sha256=weights_sha256(model),
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words of the task; decoding puts spaces where a reader wants them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(walk.VOCABULARY)}, unk_token=walk.UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\\boxed\{|[}?.]"), "isolated")]
    )
    words.decoder = decoders.Sequence(  # type: ignore[assignment]
        [
            decoders.WordPiece(cleanup=False),  # a space between any two words ...
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=\\boxed\{) | (?=[}?.])"), ""),  # ... but inside boxes and before stops
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=walk.PAD,
        eos_token=walk.EOS,
        unk_token=walk.UNKNOWN,
        model_max_length=MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def imitate(model: PreTrainedModel, stage: Stage, progress: Callable[[float], None] | None = None) -> None:
    """Minimise the mean NLL of demonstrated completion tokens: AdamW, 50 steps of warm-up, then a cosine to 3%."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.lr, betas=(0.9, 0.98), weight_decay=0.01)
    batches = _batches(stage)
    for step in range(stage.steps):
        ids, learned = next(batches)
        for group in optimizer.param_groups:
            cosine = 0.5 + 0.5 * math.cos(math.pi * step / stage.steps)
            group["lr"] = stage.lr * min(1.0, (step + 1) / 50) * (0.97 * cosine + 0.03)
        hidden = model.get_decoder()(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[learned[:, 1:]])  # type: ignore[operator]
        loss = cross_entropy(logits, ids[:, 1:][learned[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress is not None:
            progress(loss.item())


def _batches(stage: Stage) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids [n, s], mask [n, s] of the completion tokens), rows of similar length together, padded right."""
    rng = random.Random(stage.seed)
    stream = walk.demonstrations(rng, stage.endings, avoid=walk.held_out())
    index = {word: i for i, word in enumerate(walk.VOCABULARY)}
    prompt_ids = make_tokenizer().encode
    while True:
        rows = []
        for _ in range(POOL):
            journey, words = next(stream)
            rows.append((prompt_ids(journey.problem), [index[word] for word in words]))
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        cut = list(_cut(rows))
        rng.shuffle(cut)
        yield from map(_padded, cut)


def _cut(rows: list[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Rows in ascending length, cut into parts of at most `BATCH_TOKENS` padded tokens."""
    part: list[tuple[list[int], list[int]]] = []
    for prompt, completion in rows:
        if (len(part) + 1) * (len(prompt) + len(completion)) > BATCH_TOKENS:
            yield part
            part = []
        part.append((prompt, completion))
    yield part


def _padded(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    learned = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        ids[i, :end] = torch.tensor(prompt + completion)
        learned[i, len(prompt) : end] = True
    return ids, learned
