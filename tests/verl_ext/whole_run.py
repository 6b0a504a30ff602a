"""A whole verl run of a tiny model as a user starts it: Ray, TransferQueue, FSDP over gloo, and vLLM's CPU build."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grail_advantage import Method
from grail_advantage.api import PlainHost
from grail_advantage.dump import DumpRow, read_dump
from grail_advantage.weigh import weigh
from tests.core.common import rollouts_of

ROOT = Path(__file__).parents[2]
STOCK = ["tests.verl_ext.stock_run", "hydra.searchpath=[pkg://verl_cpu]", "+config=cpu"]
LIMIT = 48
"""Most response tokens."""
ANSWER = "\\boxed{5}"
"""A token that is a whole answer."""
GOLD = {"style": "rule", "ground_truth": "0"}
"""What the data set says of every prompt."""
SAID = ("stdout.txt", "stderr.txt")
"""Files of a run's folder with what it has said so far."""
NOT_STARTED = "The current node timed out during startup"
"""Said by Ray when its own processes took more than half a minute, a fixed limit, as happens where other work has the cores."""
STARTS = 3
"""Most starts of a run whose Ray did not start."""
LONGEST_RUN = 2400.0
"""Seconds: dozens of times what a run takes on an idle machine."""


def tokenizer() -> PreTrainedTokenizerFast:
    """So few tokens, among them the answer's opening and a whole answer, that a random model answers in most responses."""
    # Each of them is one token; every other character is its own.
    words = ("\\boxed{", ANSWER, "user", "assistant")
    tokens = [*"01234567+=}", *words, "\n", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    backend = Tokenizer(
        models.WordLevel(
            {token: i for i, token in enumerate(tokens)}, unk_token="<|endoftext|>"
        )
    )
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


def messages_of(number: int | str) -> list[dict[str, str]]:
    """The prompt of a row of the data set."""
    return [{"role": "user", "content": f"{number}+{number}"}]


def write_assets(folder: Path, rows: int):
    """Model, tokenizer, and data of that many prompts, of which four validate."""
    tokens = tokenizer()
    ends = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        dtype="float32",
        tie_word_embeddings=False,
        **ends,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **ends)
    model.save_pretrained(folder / "model")
    tokens.save_pretrained(folder / "model")
    data = pandas.DataFrame({"prompt": list(map(messages_of, range(rows)))})
    # verl's own columns.
    data["data_source"] = "parity"
    data["ability"] = "math"
    data["reward_model"] = [GOLD] * rows
    data["extra_info"] = [{"index": number} for number in range(rows)]
    data.to_parquet(folder / "train.parquet")
    data[:4].to_parquet(folder / "val.parquet")


@dataclass(frozen=True)
class WholeRun:
    """A finished run."""

    folder: Path
    output: str

    def dump(self, step: int) -> list[DumpRow]:
        """The step's responses, in the order in which the trainer gave them weights."""
        dump = read_dump(self.folder / "dump")
        rows = sorted(dump.rows([step]), key=lambda row: (row.update, row.row))
        assert dump.problems == []
        return rows

    def metrics(self, step: int) -> dict[str, float]:
        """What verl logged."""
        lines = [
            json.loads(line)
            for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]
        return next(line["data"] for line in lines if line["step"] == step)

    def policy(self, step: int) -> Qwen3ForCausalLM:
        """The model before a step: the initial one, or that of the checkpoint before, which must hold it as ``hf_model``."""
        folder = self.folder / "model"
        if step > 1:
            folder = self.folder / f"checkpoints/global_step_{step - 1}/actor/huggingface"
        return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def advantages_of_grpo(rows: list[DumpRow]) -> list[float]:
    """GRPO's advantages of a step's responses by hand, from their rewards."""
    frame = pandas.DataFrame({"reward": [row.reward for row in rows]})
    # verl puts the prompt first into a response's key.
    groups = frame.groupby([row.key.rsplit("_", 2)[0] for row in rows])["reward"]
    deviations = groups.transform("std") + 1e-6
    return ((frame["reward"] - groups.transform("mean")) / deviations).tolist()


def plain_weights(
    run: WholeRun,
    rows: list[DumpRow],
    signal: Method,
    temperature: float = 1.0,
    **parts,
) -> list[torch.Tensor]:
    """Weights of these responses of one step, or the advantages of a signal that gives these, by the policy before the step in
    one process; ``parts``: further ones of the record of responses."""
    rollouts = rollouts_of(
        [row.token_ids_T for row in rows],
        [float(max(row.base_advantage_T, key=abs)) for row in rows],
        [row.mask_T for row in rows],
        prompts=[torch.tensor(row.prompt_ids).long() for row in rows],
        truncated=torch.tensor([row.truncated for row in rows]),
        tokenizer=tokenizer(),
        known_spans={},
        step=rows[0].step,
        **parts,
    )
    host = PlainHost(run.policy(rollouts.step), rollouts, temperature=temperature)
    weighed = weigh(rollouts, signal, host)
    # A method of advantages has no weights.
    values_BT = weighed.weights if isinstance(signal, Method) else weighed.advantages
    return [values_T[: len(row)] for values_T, row in zip(values_BT, rows, strict=True)]


def run(folder: Path, overrides: list[str], **settings) -> WholeRun:
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
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Train in a folder, empty or of a run that is to carry on, and say how it ended: with so many prompts, and verl's own
    configuration where it is ``stock``, else the recipe's."""
    write_assets(folder, rows)
    entry = [
        "verl.trainer.main_ppo",
        f"--config-path={ROOT}/recipe/config",
        "--config-name=cpu_trainer",
        f"run.folder={folder}",
        "algorithm.norm_adv_by_std_in_grpo=True",
    ]
    new = ""
    if stock:
        entry = STOCK
        # verl's configuration knows no section of methods.
        new = "+"
    command = [
        sys.executable,
        "-m",
        *entry,
        f"hydra.run.dir={folder / 'hydra'}",
        f"{new}algorithm.token_dump.folder={folder / 'dump'}",
        f"{new}algorithm.token_dump.responses=null",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
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
    variables = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "1",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "PYTHON": sys.executable,
        **environment,
    }
    if not stock:
        variables.setdefault("VERL_USE_EXTERNAL_MODULES", "recipe.verl_start")
    outputs = [folder / name for name in SAID]
    # Ray gives up where other work has the cores; that is no fault of the run.
    for _ in range(STARTS):
        with outputs[0].open("w") as out, outputs[1].open("w") as err:
            how = {"stdout": out, "stderr": err, "timeout": LONGEST_RUN}
            code = subprocess.run(command, env=variables, cwd=ROOT, **how).returncode
        done = subprocess.CompletedProcess(
            command, code, *(path.read_text() for path in outputs)
        )
        if code == 0 or NOT_STARTED not in done.stdout + done.stderr:
            break
    return done
