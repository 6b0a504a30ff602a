"""A whole verl run of a tiny model as a user starts it: Ray, TransferQueue, FSDP over gloo, and vLLM's CPU build."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pandas
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grail_advantage import Signal, compute_token_weights
from grail_advantage.view.dump.files import DumpRow, read_dump

ROOT = Path(__file__).parents[2]
STOCK = """
hydra:
  searchpath: [pkg://verl/trainer/config, "file://{configs}"]
defaults: [ppo_trainer, cpu, _self_]
"""
LIMIT = 48
"""Most response tokens."""
ANSWER = "\\boxed{5}"
"""A token that is a whole answer."""
SAID = ("stdout.txt", "stderr.txt")
"""Files of a run's folder with what it has said so far."""
NOT_STARTED = "The current node timed out during startup"
"""Said by Ray when its own processes took more than half a minute, a fixed limit, as happens where other work has the cores."""
STARTS = 3
"""Most starts of a run whose Ray did not start."""
LONGEST_RUN = 2400.0
"""Seconds: dozens of times what a run takes on an idle machine."""


def tokenizer(opening: str = "\\boxed{", words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """So few tokens, among them the answer's opening and a whole answer, that a random model answers in most rows; ``words``
    are further ones."""
    words = (opening, ANSWER, "user", "assistant", *words)
    tokens = [*"01234567+=}", *words, "\n", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<|endoftext|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join(map(re.escape, words)) + r"|[\s\S]"), behavior="isolated"
    )
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template="{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )


def write_assets(folder: Path, rows: int, opening: str, words: Sequence[str] = ()) -> None:
    """Model, tokenizer, and data of that many prompts."""
    own = tokenizer(opening, words)
    config = Qwen3Config(
        vocab_size=len(own),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=own.eos_token_id,
        bos_token_id=None,
        pad_token_id=own.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder / "model")
    own.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "parity",
            "prompt": [{"role": "user", "content": f"{i}+{i}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": i},
        }
        for i in range(rows)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")


@dataclass(frozen=True)
class WholeRun:
    """A finished run."""

    folder: Path
    output: str

    def records(self, step: int) -> list[dict]:
        """The step's dump, one record a row, in the order in which the trainer weighed them."""
        rows = sorted(self.dump(step), key=lambda row: (row.update, row.row))
        return [
            {
                "key": row.key,
                "step": row.step,
                "prompt_ids": row.prompt_ids.tolist(),
                "response_ids": row.token_ids_T.tolist(),
                "tokens": row.tokens,
                "span": list(astuple(row.span)) if row.span else None,
                "mask": row.mask_T.astype(int).tolist(),
                "truncated": row.truncated,
                "base_advantages": row.base_advantage_T.tolist(),
                "scores": [None if math.isnan(value) else value for value in row.score_T.tolist()],
                "weights": row.weight_T.tolist(),
                "advantages": row.advantage_T.tolist(),
            }
            for row in rows
        ]

    def dump(self, step: int) -> list[DumpRow]:
        """The same rows as the dump's reader gives them."""
        dump = read_dump(self.folder / "dump")
        rows = list(dump.rows([step]))
        assert dump.problems == []
        return rows

    def metrics(self, step: int) -> dict[str, float]:
        """What verl logged."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return next(line["data"] for line in lines if line["step"] == step)

    def policy(self, step: int) -> Qwen3ForCausalLM:
        """The model before a step: the initial one, or that of the checkpoint before, which must hold it as ``hf_model``."""
        before = self.folder / "checkpoints" / f"global_step_{step - 1}" / "actor" / "huggingface"
        return Qwen3ForCausalLM.from_pretrained(before if step > 1 else self.folder / "model", dtype=torch.float32)


def advantages_of_grpo(records: list[dict]) -> list[torch.Tensor]:
    """GRPO's advantages of a step's rows by hand, from the rewards of ``parity_reward.py``."""
    groups: dict[str, list[dict]] = {}
    for record in records:
        groups.setdefault(record["key"].rsplit("_", 2)[0], []).append(record)
    advantages = {}
    for group in groups.values():
        texts = [tokenizer().decode(record["response_ids"], skip_special_tokens=True) for record in group]
        rewards = torch.tensor([float(len(text) % 2 == 0) for text in texts])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        advantages |= dict(zip((record["key"] for record in group), expected, strict=True))
    return [advantages[record["key"]] for record in records]


def plain_weights(
    run: WholeRun, records: list[dict], signal: Signal, words: Sequence[str] = (), **known: Any
) -> list[torch.Tensor]:
    """Weights of these rows of one step, or the advantages of a signal that gives these, by the policy before the step in one
    process, each row on its own padding; ``words`` are further tokens of its tokenizer, ``known`` goes to
    :func:`grail_advantage.compute_token_weights`."""
    own = tokenizer(words=words)
    width = max(len(record["prompt_ids"]) + len(record["response_ids"]) for record in records)
    ids_BL = torch.full((len(records), width), own.pad_token_id)
    valid_BL, response_BL = torch.zeros_like(ids_BL), torch.zeros_like(ids_BL)
    for row, record in enumerate(records):
        start, tokens = len(record["prompt_ids"]), record["prompt_ids"] + record["response_ids"]
        ids_BL[row, : len(tokens)] = torch.tensor(tokens)
        valid_BL[row, : len(tokens)] = 1
        response_BL[row, start : len(tokens)] = torch.tensor(record["mask"])
    advantages_B = torch.tensor(
        [0.0 if record["truncated"] else max(record["base_advantages"], key=abs) for record in records]
    )
    known["masked"] = torch.tensor([record["truncated"] for record in records])
    result = compute_token_weights(
        run.policy(records[0]["step"]), own, ids_BL, valid_BL, response_BL, advantages_B, signal, **known
    )
    found = result.advantages if signal.gives == "advantages" else result.weights
    return [
        found[row, len(record["prompt_ids"]) : len(record["prompt_ids"]) + len(record["response_ids"])]
        for row, record in enumerate(records)
    ]


def run(folder: Path, overrides: list[str], **settings: Any) -> WholeRun:
    """Train in ``folder``, see :func:`start`; the run must succeed."""
    done = start(folder, overrides, **settings)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return WholeRun(folder, done.stdout + done.stderr)


def start(
    folder: Path,
    overrides: list[str],
    *,
    rows: int,
    stock: bool = False,
    wrapper: Sequence[str] = (),
    opening: str = "\\boxed{",
    words: Sequence[str] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Train in ``folder``, and say how it ended.

    Args:
        folder: an empty folder, or that of a run that is to carry on.
        overrides: what the run is about.
        rows: prompts in the data set.
        stock: through verl's own entry point, with verl's own configuration and what a machine without an accelerator needs;
            otherwise through the recipe's.
        wrapper: words in front of the command.
        opening: of the model's answers.
        words: further tokens.
        environment: further variables.
    """
    write_assets(folder, rows, opening, words)
    entry = ["recipe.main_grail", "--config-name=cpu_trainer"]
    if stock:
        (folder / "stock.yaml").write_text(STOCK.format(configs=ROOT / "recipe" / "config"))
        entry = ["tests.verl_ext.stock_run", f"--config-path={folder}", "--config-name=stock"]
    command = [
        sys.executable,
        "-m",
        *entry,
        f"hydra.run.dir={folder / 'hydra'}",
        f"{'+' if stock else ''}algorithm.token_dump.folder={folder / 'dump'}",
        f"{'+' if stock else ''}algorithm.token_dump.rows=null",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'train.parquet'}",
        "data.max_prompt_length=16",
        f"data.max_response_length={LIMIT}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=256",
        f"reward.custom_reward_function.path={Path(__file__).with_name('parity_reward.py')}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        *overrides,
    ]
    command = [*wrapper, *command]
    variables = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    said = [folder / name for name in SAID]
    for _ in range(STARTS):
        with said[0].open("w") as out, said[1].open("w") as err:
            code = subprocess.run(
                command, env=variables, cwd=ROOT, stdout=out, stderr=err, timeout=LONGEST_RUN
            ).returncode
        done = subprocess.CompletedProcess(command, code, *(path.read_text() for path in said))
        if code == 0 or NOT_STARTED not in done.stdout + done.stderr:
            break
    return done
