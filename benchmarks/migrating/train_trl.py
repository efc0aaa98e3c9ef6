from datasets import load_dataset
from rewards import correct
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    model="models/start",
    reward_funcs=correct,
    train_dataset=load_dataset("json", data_files="questions.jsonl", split="train"),  # columns: prompt, answer
    args=GRPOConfig(
        output_dir="runs/trl",
        per_device_train_batch_size=32,  # 4 questions of 8 completions
        num_generations=8,
        max_completion_length=80,
        temperature=0.8,
        top_p=0.9,
        learning_rate=1e-4,
        max_steps=60,
    ),
)
trainer.train()
