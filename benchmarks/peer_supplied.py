"""The supplied recipe (package reasoning-from-scratch, chapter 6) as a worker of `peers.py`: its own model, sampler,
loss and clip, with the weights of the common model."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peer_task import CASES, GROUP, LEARNING_RATE, PROMPTS, SHAPES, TEMPERATURE, Worker, question, reward
from reasoning_from_scratch import ch06
from reasoning_from_scratch.qwen3 import Qwen3Model, load_hf_weights_into_qwen
from safetensors.torch import load_file
from transformers import AutoTokenizer


class Tokenizer:
    """What the recipe asks of a tokenizer. Without an end of its own, no completion ends before the cap."""

    def __init__(self, folder: Path, ends: bool) -> None:
        self._inner = AutoTokenizer.from_pretrained(folder)
        self.eos_token_id = self._inner.eos_token_id if ends else -1

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """The ids themselves: the reward is a function of them."""
        return " ".join(map(str, ids))


def build_model(name: str, folder: Path, dtype: torch.dtype) -> Qwen3Model:
    shape = SHAPES[name]
    settings: dict[str, Any] = {
        "vocab_size": shape["vocab_size"],
        "context_length": 2048,
        "emb_dim": shape["hidden_size"],
        "n_heads": shape["num_attention_heads"],
        "n_layers": shape["num_hidden_layers"],
        "hidden_dim": shape["intermediate_size"],
        "head_dim": shape["head_dim"],
        "n_kv_groups": shape["num_key_value_heads"],
        "qk_norm": True,
        "rope_base": 1_000_000.0,
        "dtype": dtype,
    }
    model = Qwen3Model(settings)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    load_hf_weights_into_qwen(model, settings, weights)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--updates", type=int, default=1000)
    args = parser.parse_args()
    worker = Worker()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = CASES[args.case]
    model = build_model(case.model, args.model, torch.bfloat16 if args.bf16 else torch.float32)
    tokenizer = Tokenizer(args.model, case.ends)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    draw = worker.staged(ch06.sample_response, "generation")
    rollouts: list[list[int]] = []
    replay: list[list[int]] = []

    def sample(**words: Any) -> tuple[torch.Tensor, int, str]:
        if replay:
            prompt = tokenizer.encode(words["prompt"])
            ids, count = torch.tensor(prompt + replay.pop(0)), len(prompt)
        else:
            ids, count, _ = draw(**words)
        rollouts.append(ids[count:].tolist())
        return ids, count, tokenizer.decode(rollouts[-1])

    hold: Any = ch06
    hold.sample_response = sample
    hold.render_prompt = lambda text: text
    hold.reward_rlvr = lambda text, answer: reward(case, answer, [int(i) for i in text.split()])
    hold.sequence_logprob = worker.staged(ch06.sequence_logprob, "forward")
    facts: dict[str, Any] = {"version": version("reasoning-from-scratch")}
    for update in range(args.updates):
        command = worker.turn(**facts)
        replay[:], rollouts[:] = command.get("rollouts") or [], []
        optimizer.zero_grad()
        loss, rewards = 0.0, []
        for number in range(update * PROMPTS, (update + 1) * PROMPTS):
            text = question(number)
            out = ch06.compute_grpo_loss(
                model,
                tokenizer,
                {"problem": text, "answer": text},
                "cpu",
                num_rollouts=GROUP,
                max_new_tokens=case.max_new_tokens,
                temperature=TEMPERATURE,
                top_p=case.top_p,
            )
            with worker.stage("backward"):
                (out["loss_tensor"] / PROMPTS).backward()
            loss += out["loss"] / PROMPTS
            rewards += out["rewards"]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens = sum(map(len, rollouts))
        facts = {
            "tokens": tokens,
            "rollouts": rollouts.copy(),
            "rewards": rewards,
            "loss": loss,
            "grad_norm": float(norm),
        }


if __name__ == "__main__":
    main()
