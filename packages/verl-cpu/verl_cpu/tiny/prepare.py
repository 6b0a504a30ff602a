"""Make the input of a small training run: model, tokenizer, ``train.parquet`` and ``validation.parquet``.

    python -m verl_cpu.tiny.prepare --output-dir DIR --seed 0

A second call with the same settings and the same code finds ``DIR/warm_up.json`` and returns at once.
"""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_cpu.tiny.shipped import TRAIN, load_agent, load_shipped
from verl_cpu.tiny.task import Problem, problems

STAMP = "warm_up.json"
BASES = {"tiny": (load_shipped, 256), "agent": (load_agent, 128)}
"""A model of 0.65 M parameters, and the same with a tool; the number of held-out problems."""


def prepare(output_dir: Path, base_model: str = "tiny", seed: int = 0) -> bool:
    """Fill ``output_dir``; returns False when an earlier call with the same settings and code had already done so, and
    its files are as it left them."""
    stamp = output_dir / STAMP
    load, held_out = BASES[base_model]
    settings = {"base_model": base_model, "seed": seed, "code": code_digest()}
    if stamp.is_file() and stamp.read_text() == stamp_text(settings, output_dir):
        print(f"reused {output_dir}: settings and code are unchanged", flush=True)
        return False

    output_dir.mkdir(parents=True, exist_ok=True)
    # It is written last, so that an interrupted call is not taken for a finished one.
    stamp.unlink(missing_ok=True)
    splits = {
        "train": problems("train", TRAIN, seed=seed),
        "validation": problems("validation", held_out, seed=seed),
    }
    write(output_dir, *load(), splits)
    stamp.write_text(stamp_text(settings, output_dir))
    print(f"wrote {output_dir}", flush=True)
    return True


def write(
    output_dir: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splits: Mapping[str, Sequence[Problem]],
) -> None:
    """Write the input of a run: ``model/``, and a file of problems for each split."""
    for split, chosen in splits.items():
        rows = [
            {
                "data_source": "tiny_chain_sum",
                "prompt": [{"role": "user", "content": problem.text}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
                "extra_info": {"split": split, "index": index, "problem": problem.text},
            }
            for index, problem in enumerate(chosen)
        ]
        pq.write_table(pa.Table.from_pylist(rows), output_dir / f"{split}.parquet")
    model.save_pretrained(output_dir / "model")
    tokenizer.save_pretrained(output_dir / "model")


def stamp_text(settings: dict[str, object], output_dir: Path) -> str:
    """Returns the settings and a hash of the files that were made with them."""
    files = [*output_dir.glob("*.parquet"), *(output_dir / "model").glob("*")]
    return json.dumps({**settings, "files": digest_of(files)}, indent=2) + "\n"


def code_digest() -> str:
    """Hash of this folder's sources and models: a changed task or model makes an old folder stale."""
    patterns = ("*.py", "*/*.json", "*/*.safetensors")
    return digest_of([file for pattern in patterns for file in Path(__file__).parent.glob(pattern)])


def digest_of(files: list[Path]) -> str:
    """Hash of the names and contents of files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write a tiny SFT-initialised model and its arithmetic data."
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems")
    parser.add_argument("--base-model", choices=BASES, default="tiny", help="the model to train")
    prepare(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
