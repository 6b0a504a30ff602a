from datasets import load_dataset
from trl import GRPOConfig

from grail_advantage.reward import compute_score
from grail_advantage.trl_ext import TokenWeightGRPOTrainer

ASK = "\nReason step by step, and put your final answer within \\boxed{}."


def with_prompt(row):
    answer = row["answer"].rsplit("####", 1)[-1].strip()
    return {"prompt": [{"role": "user", "content": row["question"] + ASK}], "solution": answer}


def reward(completions, solution, **_):
    pairs = zip(completions, solution, strict=True)
    return [
        compute_score("", completion[-1]["content"], answer)["score"]
        for completion, answer in pairs
    ]


trainer = TokenWeightGRPOTrainer(  # GRPOTrainer and the two last arguments
    "Qwen/Qwen3-0.6B",
    reward_funcs=reward,
    args=GRPOConfig(
        "out",
        loss_type="dr_grpo",
        scale_rewards="none",
        max_completion_length=1024,
        chat_template_kwargs={"enable_thinking": False},
    ),
    train_dataset=load_dataset("openai/gsm8k", "main", split="train").map(
        with_prompt, remove_columns=["answer"]
    ),
    token_weights="grail",
    token_dump="out/tokens",
)
trainer.train()
