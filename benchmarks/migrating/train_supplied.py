import json
from pathlib import Path

from reasoning_from_scratch import ch06
from start import load_model_and_tokenizer

ch06.render_prompt = lambda problem: problem  # this policy's prompt is the problem itself
rows = [json.loads(line) for line in Path("questions.jsonl").read_text().splitlines()]
model, tokenizer = load_model_and_tokenizer("models/start")

ch06.train_rlvr_grpo(
    model,
    tokenizer,
    [{"problem": row["prompt"], "answer": row["answer"]} for row in rows],
    "cpu",
    steps=60,
    num_rollouts=8,
    max_new_tokens=80,
    temperature=0.8,
    top_p=0.9,
    lr=1e-4,
)
