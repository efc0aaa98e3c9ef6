"""What the implementations in a comparison share: models, questions, reward, and how a worker is asked for an update.

A worker is one process with one implementation. It answers one JSON line when it is ready and one for each command, so
that `peers.py` can run several of them in turn on one machine. Needs torch and transformers only; run by itself it
writes a model: ``python benchmarks/peer_task.py tiny64 models/tiny64``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import string
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS, GROUP, TEMPERATURE = 4, 8, 0.8
# So small that no FP32 weight moves: every update of every implementation has the same policy, and can be compared.
LEARNING_RATE = 1e-12


@dataclass(frozen=True)
class Case:
    """One row of the comparison. `ends`: completions may end by EOS; otherwise all have `max_new_tokens`. `uniform`:
    every other question gives all its completions the same reward."""

    model: str
    max_new_tokens: int
    top_p: float = 0.9
    ends: bool = False
    uniform: bool = False


CASES = {
    "tiny64-128": Case("tiny64", 128),
    "tiny64-eos": Case("tiny64", 128, ends=True, uniform=True),
    "bigvocab-32": Case("bigvocab", 32),
    "bigvocab-128": Case("bigvocab", 128, top_p=1.0),
}

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
CHARACTERS = string.digits + string.ascii_lowercase + " +-*/=()<>.,:;?!\n'\"_#%&"
SHAPES: dict[str, dict[str, int]] = {
    "tiny64": {
        "vocab_size": 64,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
    },
    "bigvocab": {
        "vocab_size": 151_936,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
    },
}


def build_model(name: str, folder: Path) -> None:
    """Write a Qwen3 policy of random BF16 weights with tied embeddings and a tokenizer of single characters."""
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[name]
    words = [*SPECIAL, *CHARACTERS][:64]
    words += [f"<{i}>" for i in range(len(words), shape["vocab_size"])]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIAL))
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_theta=1e6,
        pad_token_id=None,  # transformers would leave that id's embedding without a gradient, and the id is sampled
        eos_token_id=1,
        bos_token_id=2,
    )
    partial = folder.with_name(f"{folder.name}.partial")
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(partial)  # type: ignore[arg-type]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", clean_up_tokenization_spaces=False, **names
    )
    fast.save_pretrained(partial)
    partial.rename(folder)


def question(number: int) -> str:
    """The text of a question, always ten characters; update u (from 0) asks those from ``u * PROMPTS``."""
    return f"{number:04d}+{7 * number % 90:02d}*{3 * number % 10}="


def reward(case: Case, text: str, token_ids: Sequence[int]) -> float:
    """The share of even ids, the same in every implementation and free; 1 throughout a group that is to be uniform."""
    if case.uniform and int(text[:4]) % 2:
        return 1.0
    return sum(i % 2 == 0 for i in token_ids) / len(token_ids)


class Worker:
    """The side of the implementation: it calls `turn` where an update begins, and `stage` around what is to be told
    apart. Everything between two turns is the update; the wait for the command is not."""

    def __init__(self) -> None:
        self._pipe = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever libraries print goes to stderr
        self._began: float | None = None
        self._memory = 0.0

    def turn(self, **facts: Any) -> dict[str, Any]:
        """Answer the last command with its cost and these facts, and wait for the next one. Memory is what was added to
        that before the first update, or before the last one whose command said ``again``."""
        if self._began is None:
            self._count_memory()
        else:
            facts |= {
                "cpu": time.process_time() - self._began,
                "stages": self._stages,
                "added_mib": resident("VmHWM") - self._memory,
            }
        print(json.dumps(facts), file=self._pipe, flush=True)
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        command = json.loads(line)
        if command.get("again"):
            self._count_memory()
        self._stages: dict[str, float] = {}
        self._began = time.process_time()
        return command

    def _count_memory(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts from here
        self._memory = resident("VmRSS")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self._stages[name] = self._stages.get(name, 0.0) + time.process_time() - began

    def staged(self, function: Any, name: str) -> Any:
        """`function` as a stage of its own."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return function(*args, **kwargs)

        return timed


def resident(field: str) -> float:
    """MiB of resident memory of this process: "VmRSS" now, "VmHWM" at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


if __name__ == "__main__":
    build_model(sys.argv[1], Path(sys.argv[2]))
