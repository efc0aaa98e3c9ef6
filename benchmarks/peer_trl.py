"""TRL's GRPOTrainer as a worker of `peers.py`: its defaults (DAPO loss, gradient checkpointing, fused AdamW), FP32."""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import trl
from datasets import Dataset
from peer_task import CASES, GROUP, LEARNING_RATE, PROMPTS, TEMPERATURE, Worker, question, reward
from transformers import AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer


class Turns(TrainerCallback):
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.facts: dict[str, Any] = {"version": trl.__version__}
        self.replay: list[list[int]] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.log_history:
            self.facts |= {name: state.log_history[-1][name] for name in ("loss", "grad_norm")}
        command = self.worker.turn(**self.facts)
        self.facts = {}
        self.replay = command.get("rollouts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--updates", type=int, default=1000)
    args = parser.parse_args()
    worker = Worker()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    case = CASES[args.case]
    turns = Turns(worker)

    def rewards(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        values = [reward(case, text, ids) for text, ids in zip(prompts, completion_ids)]
        turns.facts |= {"rewards": values, "rollouts": completion_ids, "tokens": sum(map(len, completion_ids))}
        return values

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(args.model),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=rewards,
            train_dataset=Dataset.from_dict({"prompt": [question(i) for i in range(args.updates * PROMPTS)]}),
            callbacks=[turns],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=args.bf16,
                model_init_kwargs={"dtype": "float32"},
                per_device_train_batch_size=PROMPTS * GROUP,
                num_generations=GROUP,
                max_completion_length=case.max_new_tokens,
                temperature=TEMPERATURE,
                top_p=case.top_p,
                generation_kwargs=None if case.ends else {"min_new_tokens": case.max_new_tokens},
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                max_steps=args.updates,
                shuffle_dataset=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        hold: Any = trainer
        sample = worker.staged(hold._generate_single_turn, "generation")
        hold._generate_single_turn = lambda *a, **k: (turns.replay, None) if turns.replay else sample(*a, **k)
        hold._get_per_token_logps_and_entropies = worker.staged(hold._get_per_token_logps_and_entropies, "forward")
        hold.accelerator.backward = worker.staged(hold.accelerator.backward, "backward")
        trainer.train()


if __name__ == "__main__":
    main()
