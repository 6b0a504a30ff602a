"""GRAIL in TRL with its authors' own arguments | Qwen3-4B | 4 GPUs with 80 GB | DeepMath-103K

    accelerate launch --num_processes 4 --use_deepspeed --zero_stage 2 -m examples.trl_published
    accelerate launch --num_processes 4 --use_deepspeed --zero_stage 2 -m examples.trl_published --method uniform

in the repository, with ``pip install -e '.[trl]' vllm deepspeed flash-attn``. The arguments are those of
``recipe/published.py``, which docs/published.md shows one by one with what is not reproduced. ``--set`` changes one,
and another number of processes keeps 256 responses an update. DeepSpeed keeps a copy of the bfloat16 weights in
float32, in which updates of 1e-6 do not vanish; without it the weights are float32. Not run on a GPU yet.
"""

import argparse
import os
from pathlib import Path

import yaml
from datasets import Dataset, load_dataset
from trl import GRPOConfig

from examples.trl_grail import read_rows, reward
from grail_advantage.method import methods
from grail_advantage.reward import check_ground_truths
from grail_advantage.trl_ext import TokenWeightGRPOTrainer
from recipe.data.specs import PUBLISHED_SUFFIX
from recipe.published import MODEL, trl_arguments

OPTIONS = {"oar_g": {"variant": "grail_port"}}  # the published comparison's


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    of_model = {setting.name: setting.theirs for setting in MODEL}
    parser.add_argument(
        "--method", default="grail", choices=sorted(methods()), help="uniform: the baseline"
    )
    parser.add_argument(
        "--model", default=of_model["model_name_or_path"], help="hub name or folder"
    )
    parser.add_argument(
        "--data",
        default=next(iter(of_model["dataset_mixer"])),
        help="hub name, or a .jsonl file with `prompt` and `solution`",
    )
    parser.add_argument("--output", type=Path, help="default: outputs/trl_published_METHOD")
    parser.add_argument(
        "--set", action="append", default=[], help="NAME=VALUE of GRPOConfig's, in YAML"
    )
    options = parser.parse_args()
    output = options.output or Path("outputs", f"trl_published_{options.method}")
    arguments = trl_arguments(int(os.environ.get("WORLD_SIZE", "1")))
    dtype = "float32"
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":  # it keeps a copy in float32
        dtype = of_model["dtype"]
    arguments["model_init_kwargs"] = {
        "dtype": dtype,
        "attn_implementation": of_model["attn_implementation"],
    }
    arguments |= {name: of_model[name] for name in ("save_steps", "save_total_limit")}
    arguments["logging_steps"] = 1
    arguments["save_only_model"] = True
    arguments["report_to"] = "none"
    for setting in options.set:
        name, _, value = setting.partition("=")
        arguments[name] = yaml.safe_load(value)
    trainer = TokenWeightGRPOTrainer(
        options.model,
        reward,
        GRPOConfig(str(output), **arguments),
        train_dataset=problems(options.data),
        token_weights=options.method,
        token_weight_options=OPTIONS.get(options.method),
        token_dump={"folder": output / "tokens", "every": 10},
    )
    trainer.train()
    trainer.save_model()


def problems(source: str) -> Dataset:
    """Rows with ``prompt``, a message that ends as the published one does (U+0008 and ``oxed{}``), and ``solution``."""
    if Path(source).suffix == ".jsonl":
        rows = Dataset.from_list(read_rows(source))
    else:
        rows = load_dataset(source, split="train")
    check_ground_truths(rows["solution"], source)
    return rows.map(
        lambda row: {
            "prompt": [
                {**row["prompt"][0], "content": row["prompt"][0]["content"] + PUBLISHED_SUFFIX}
            ]
        }
    )


if __name__ == "__main__":
    main()
