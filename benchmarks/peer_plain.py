"""Plain transformers as a worker of `peers.py`: generate, one forward, one backward, AdamW; no trainer around it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from peer_task import CASES, GROUP, LEARNING_RATE, PROMPTS, TEMPERATURE, Worker, question, reward
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


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
    logging.set_verbosity_error()
    case = CASES[args.case]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32").eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    eos = tokenizer.eos_token_id
    facts: dict[str, Any] = {"version": transformers.__version__}
    for update in range(args.updates):
        command = worker.turn(**facts)
        texts = [question(i) for i in range(update * PROMPTS, (update + 1) * PROMPTS) for _ in range(GROUP)]
        prompts = torch.tensor(tokenizer(texts, add_special_tokens=False).input_ids)  # all of one length
        if command.get("rollouts"):
            completions = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(x) for x in command["rollouts"]], batch_first=True, padding_value=eos
            )
        else:
            with worker.stage("generation"), torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                completions = model.generate(
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    do_sample=True,
                    temperature=TEMPERATURE,
                    top_p=case.top_p,
                    top_k=0,
                    max_new_tokens=case.max_new_tokens,
                    min_new_tokens=None if case.ends else case.max_new_tokens,
                    pad_token_id=eos,
                )[:, prompts.shape[1] :]
        ended = (completions == eos).int()
        mask = (ended.cumsum(1) - ended == 0) | (not case.ends)
        rollouts = [row[keep].tolist() for row, keep in zip(completions, mask)]
        rewards = torch.tensor([reward(case, text, ids) for text, ids in zip(texts, rollouts)])
        groups = rewards.view(PROMPTS, GROUP)
        advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        weights = advantage.view(-1, 1) * mask / mask.sum()
        with worker.stage("forward"), torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            ids = torch.cat([prompts, completions], 1)
            kept = completions.shape[1] + 1
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[:, :-1].float() / TEMPERATURE
            logprobs = logits.gather(2, completions[..., None])[..., 0] - logits.logsumexp(2)
            loss = -((logprobs - logprobs.detach()).exp() * weights).sum()
            del logits
        with worker.stage("backward"):
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        facts = {
            "tokens": sum(map(len, rollouts)),
            "rollouts": rollouts,
            "rewards": rewards.tolist(),
            "loss": float(loss.detach()),
            "grad_norm": float(norm),
        }


if __name__ == "__main__":
    main()
