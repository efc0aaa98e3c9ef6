"""The first update of docs/migrating.md's scripts, as they are but in FP32: rollouts, rewards, loss, gradient norm.

    make peers
    .venv-peers/bin/python benchmarks/migrating/record.py trl supplied --out tests/golden/migrating.json

FP32, because BF16 rounds differently in different code; tests/test_migrating.py holds our configs to these figures.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from rlvr_pl.data.pools import load_questions
from rlvr_pl.policy_folder import find_folder

HERE = Path(__file__).resolve().parent


class Stop(Exception):
    """Ends a script after its first update."""


def record_trl() -> dict[str, Any]:
    import rewards
    import transformers
    import trl

    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {"versions": {name: version(name) for name in ("trl", "transformers", "torch")}}
    settings, score = trl.GRPOConfig, rewards.correct

    class Recorded(trl.GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **words: Any) -> Any:
            drawn = super()._generate_single_turn(*args, **words)
            found["rollouts"] = drawn[0]
            return drawn

        def compute_loss(self, *args: Any, **words: Any) -> Any:
            loss = super().compute_loss(*args, **words)
            found["loss"] = float(loss)
            return loss

    def scored(prompts: list[str], completions: list[str], answer: list[str], **words: Any) -> list[float]:
        found["prompts"], found["rewards"] = list(prompts), score(completions, answer, **words)
        return found["rewards"]

    quiet = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    once = {"bf16": False, "model_init_kwargs": {"dtype": "float32"}, "max_steps": 1}
    trl.GRPOTrainer, rewards.correct = Recorded, scored
    trl.GRPOConfig = lambda **words: settings(**{**words, **once, **quiet})
    script = runpy.run_path(str(HERE / "train_trl.py"))
    found["grad_norm"] = script["trainer"].state.log_history[0]["grad_norm"]
    return found


def record_supplied() -> dict[str, Any]:
    from reasoning_from_scratch import ch06

    found: dict[str, Any] = {"versions": {name: version(name) for name in ("reasoning-from-scratch", "torch")}}
    draw, learn, clip = ch06.sample_response, ch06.compute_grpo_loss, torch.nn.utils.clip_grad_norm_
    rollouts: list[list[int]] = []

    def sample(**words: Any) -> Any:
        ids, count, text = draw(**words)
        rollouts.append(ids[count:].tolist())
        return ids, count, text

    def loss(**words: Any) -> Any:
        rollouts.clear()
        out = learn(**words)
        found.update(prompts=[words["example"]["problem"]] * len(rollouts), rollouts=list(rollouts))
        found.update(rewards=out["rewards"], loss=out["loss"])
        return out

    def clipped(*args: Any, **words: Any) -> Any:
        found["grad_norm"] = float(clip(*args, **words))
        if len(set(found["rewards"])) > 1:  # an update that teaches something
            raise Stop
        return None

    ch06.sample_response, ch06.compute_grpo_loss, torch.nn.utils.clip_grad_norm_ = sample, loss, clipped
    ch06.append_csv_metrics = lambda *args: None
    torch.optim.AdamW.step = lambda self: None  # so that a later update is the first one, too
    try:
        runpy.run_path(str(HERE / "train_supplied.py"))
    except Stop:
        return found
    raise RuntimeError("no group with unequal rewards")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", choices=("trl", "supplied"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    out = args.out.resolve()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.path.insert(0, str(HERE))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("models").mkdir()
        Path("models/start").symlink_to(find_folder("embedded:start"))
        rows = [{"uid": q.uid, "prompt": q.problem, "answer": q.answer} for q in load_questions("embedded:train")[:200]]
        Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for peer in args.peers:
            found[peer] = {"trl": record_trl, "supplied": record_supplied}[peer]()
            print(peer, {name: found[peer][name] for name in ("loss", "grad_norm", "rewards")}, file=sys.stderr)
    out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
