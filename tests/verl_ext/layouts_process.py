"""Run by test_layouts in a process of its own: the trainers' advantages through a real TransferQueue and a real FSDP engine.

Usage: ``python -m tests.verl_ext.layouts_process DIRECTORY``. The directory holds the model; ``result.pt`` is written into it.
Every scenario puts the same rollouts into TransferQueue twice and lets verl's trainer and the trainer with token weights
compute their advantages. Nothing is judged here.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq
import verl  # noqa: F401  loads the plug-in that makes the CPU verl's device
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from grail_advantage import GrailConfig
from grail_advantage.verl_ext.trainers import TokenWeightDetachActorWorker
from tests.composed import compose
from tests.core.tiny_models import END_ID, char_tokenizer, encode
from tests.verl_ext.engines import Setup, build_engine, shards, train_step

FIELDS = ("advantages", "returns", "response_mask", "loss_mask", "rollout_is_weights", "token_level_rewards")
UPDATES = 2
"""Optimiser steps between a step's first policy and the one that a later update of the step starts from."""


@dataclass(frozen=True)
class Output:
    """One row: its key is ``{uid}_{session}_{index}``."""

    uid: str
    session: int
    index: int
    prompt: str
    response: str
    reward: float

    @property
    def key(self) -> str:
        return f"{self.uid}_{self.session}_{self.index}"


def _group(uid: str, prompt: str, *answers: tuple[str, float]) -> list[Output]:
    return [Output(uid, session, 0, prompt, response, reward) for session, (response, reward) in enumerate(answers)]


GROUPS = {
    "a": _group(
        "a",
        "Two plus three?",
        (r"Two and three make \boxed{5}, so five it is.<end>", 1.0),
        (r"It must be \boxed{4}.<end>", 0.0),
        (r"I think so: \boxed{6}<end>", 0.0),
        ("I do not know, boxed{3} or {4}.<end>", 0.0),
    ),
    "b": _group(
        "b",
        "Half?",
        (r"\boxed{4} no, it is \boxed{\frac{1}{2}}<end>", 1.0),
        (r"Clearly \boxed{2}.<end>", 0.0),
        (r"=\boxed{3}<end>", 0.0),
        (r"First \boxed{3}, no, \boxed{0.5}<end>", 1.0),
    ),
    "c": _group("c", "Three?", *[(rf"Sure, \boxed{{{digit}}}<end>", 0.0) for digit in range(4)]),
    **{
        uid: _group(
            uid, "Four?", (r"Well, \boxed{4}<end>", 1.0), *[(rf"Hm, \boxed{{{digit}}}<end>", 0.0) for digit in range(3)]
        )
        for uid in "de"
    },
}
TWO_GROUPS = [*GROUPS["a"], *GROUPS["b"]]
# Earlier outputs of a session carry the reward of its last one, as verl's agent loop writes them.
SEVERAL_OUTPUTS = [
    *TWO_GROUPS,
    Output("a", 0, 1, "Two plus three? Sure?", r"Yes, \boxed{5}.<end>", 1.0),
    Output("a", 1, 1, "Two plus three? Sure?", "Let me see.<end>", 0.0),
    Output("a", 1, 2, "Two plus three? Sure? Yes?", r"Then it is \boxed{4}.<end>", 0.0),
]
CORRECTION = "algorithm.rollout_correction"
TOKENS = [
    f"{CORRECTION}.rollout_is=token",
    f"{CORRECTION}.rollout_rs=token_k1",
    f"{CORRECTION}.rollout_rs_threshold='0.7_1.4'",
]
SEQUENCES = [
    f"{CORRECTION}.rollout_is=sequence",
    f"{CORRECTION}.rollout_rs=seq_mean_k1",
    f"{CORRECTION}.rollout_rs_threshold='0.95_1.05'",
]
KL = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1"]


@dataclass(frozen=True)
class Scenario:
    """Rollouts, the options, and verl's name of the trainer."""

    overrides: list[str] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=lambda: TWO_GROUPS)
    mode: str = "sync"


SCENARIOS = {
    "plain": Scenario(),
    "colocate_async": Scenario(mode="colocate_async"),
    "separate_async": Scenario(mode="separate_async"),
    "KL in reward": Scenario(KL),
    "decoupled, tokens": Scenario(TOKENS),
    "decoupled, sequences": Scenario(SEQUENCES),
    "bypass": Scenario([f"{CORRECTION}.bypass_mode=True", *TOKENS]),
    "several outputs": Scenario(outputs=SEVERAL_OUTPUTS),
    "everything": Scenario([*KL, *TOKENS], SEVERAL_OUTPUTS, "colocate_async"),
}


class Workers:
    """The actor's worker group: one worker, in this process."""

    def __init__(self, engine: Any, strategy: str) -> None:
        self._dispatch_info = {"actor": [0]}
        self._worker = TokenWeightDetachActorWorker.__new__(TokenWeightDetachActorWorker)
        self._worker._strategy_handlers = None
        self._worker.config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))
        self._worker.actor = SimpleNamespace(engine=engine)
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return getattr(self._worker, name)(*arguments)

        return call


class Experiments:
    """One method a kind; each returns plain data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = self.build("fsdp2")

    def build(self, strategy: str) -> Any:
        engine = build_engine(Setup("model", strategy), self.folder)
        engine.engine_config.use_dynamic_bsz = False
        engine.engine_config.micro_batch_size_per_gpu = 3
        return engine

    def trainer(self, overrides: list[str], mode: str, workers: Workers, estimator: str = "grail") -> Any:
        """A trainer with all that its advantages need; what starts servers and datasets is left out."""
        given = [
            f"algorithm.adv_estimator={estimator}",
            f"trainer.v1.trainer_mode={mode}",
            "data.max_response_length=64",
            "data.train_batch_size=3",
            "actor_rollout_ref.rollout.n=4",
        ]
        cls = get_trainer_cls(mode if estimator == "grpo" else f"grail_{mode}")
        trainer = cls.__new__(cls)
        trainer.config = compose("cpu_trainer", [*given, *overrides])
        trainer.trainer_mode = mode
        trainer.signal = GrailConfig("robust", gate="all")
        trainer.tokenizer = char_tokenizer()
        trainer._end_tokens = {END_ID}
        trainer._context_length = 4096
        trainer.timing_raw = {}
        trainer.global_steps, trainer.local_trigger_step = 1, 0
        trainer.kl_ctrl_in_reward = core_algos.get_kl_controller(trainer.config.algorithm.kl_ctrl)
        trainer.actor_rollout_wg = workers
        return trainer

    def scenario(self, name: str) -> dict[str, Any]:
        """Both trainers' results on the scenario's rollouts."""
        results: dict[str, Any] = {}
        scenario = SCENARIOS[name]
        for kind, estimator in (("verl", "grpo"), ("weighted", "grail")):
            batch = _put(f"{kind}-{name}", scenario.outputs)
            trainer = self.trainer(scenario.overrides, scenario.mode, Workers(self.engine, "fsdp2"), estimator)
            metrics: dict[str, Any] = {}
            batch = trainer._compute_advantage(batch, metrics)
            padding = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding", False)]
            results[kind] = {"rows": _get(batch), "metrics": metrics, "padding": padding}
        return results

    def filtered_groups(self, mode: str) -> dict[str, Any]:
        """A batch from verl's replay buffer with group filtering, which drops the group without a difference."""

        def finish(uids: str) -> None:
            for uid in uids:
                _put("train", GROUPS[uid], multiple=1)
                tag = {"is_prompt": True, "status": "finished", "global_steps": 1}
                tq.kv_batch_put(keys=[uid], partition_id="train", tags=[tag])

        sampler = "trainer.v1.sampler.custom_sampler"
        overrides = ["algorithm.filter_groups.enable=True", f"{sampler}.path=null", f"{sampler}.name=null"]
        trainer = self.trainer(overrides, mode, Workers(self.engine, "fsdp2"))
        refills: list[int] = []

        def refill(count: int) -> int:
            refills.append(count)
            finish("de"[:count])
            return count

        trainer._add_prompts_to_generate = refill
        buffer = trainer._build_replay_buffer()
        finish("abc")
        batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=3)
        batch = trainer._compute_advantage(batch, metrics)
        rows = _get(batch)
        tq.kv_clear(list(tq.kv_list("train")["train"]), "train")
        return {"rows": rows, "metrics": metrics, "refills": refills}

    def later_update(self, strategy: str) -> dict[str, Any]:
        """The separate trainer at a later update of a step, whose policy has moved on from the step's first."""
        engine = self.build(strategy)
        workers = Workers(engine, strategy)
        workers.save_model_to_cpu(0)  # as verl's trainer at the first update
        first = shards(engine)
        rows = [(torch.cat([_ids(output.prompt), _ids(output.response)]), len(output.prompt)) for output in GROUPS["a"]]
        for _ in range(UPDATES):
            train_step(engine, rows)
        moved = shards(engine)

        def is_back() -> bool:
            return all(map(torch.equal, moved, shards(engine)))

        results: dict[str, Any] = {"moved": not all(map(torch.equal, first, moved))}
        for name, overrides in (("decoupled", []), ("bypass", [f"{CORRECTION}.bypass_mode=True"])):
            trainer = self.trainer(overrides, "separate_async", workers)
            trainer.local_trigger_step = 1
            workers.calls.clear()
            batch = trainer._compute_advantage(_put(f"{strategy}-{name}", TWO_GROUPS), {})
            results[name] = {"rows": _get(batch), "calls": list(workers.calls), "policy_is_back": is_back()}
        trainer = self.trainer([], "separate_async", workers)
        trainer.local_trigger_step = 1
        batch = _put(f"{strategy}-raises", TWO_GROUPS)
        workers.compute_token_scores = lambda *_: 1 / 0
        try:
            trainer._compute_advantage(batch, {})
        except ZeroDivisionError:
            results["back after an error"] = is_back()
        results["kept policies"] = sorted(workers._worker.cpu_saved_models)
        return results


def _ids(text: str) -> torch.Tensor:
    return torch.tensor(encode(text))


def _put(partition: str, outputs: list[Output], multiple: int = 5) -> Any:
    """Write rollouts into TransferQueue as verl's agent loop does, fill up, and add log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    rows, tags, log_probs = [], [], []
    for output in outputs:
        prompt, response = _ids(output.prompt), _ids(output.response)
        length = len(response)
        old = -2 * torch.rand(length, generator=generator)
        spread = 0.3 * torch.randn((2, length), generator=generator)
        log_probs.append({"old_log_probs": old, "ref_log_prob": old + spread[1]})
        tags.append(
            {"status": "success", "prompt_len": len(prompt), "response_len": length, "seq_len": len(prompt) + length}
        )
        rows.append(
            {
                "uid": output.uid,
                "session_id": output.session,
                "num_turns": 2,
                "prompts": prompt,
                "responses": response,
                "input_ids": torch.cat([prompt, response]),
                "attention_mask": torch.ones(len(prompt) + length, dtype=torch.int64),
                "position_ids": torch.arange(len(prompt) + length),
                "response_mask": torch.ones(length, dtype=torch.int64),
                "loss_mask": torch.ones(length, dtype=torch.int64),
                "rm_scores": torch.zeros(length).index_fill(0, torch.tensor([length - 1]), output.reward),
                "rollout_log_probs": old + spread[0],
            }
        )
    keys = [output.key for output in outputs]
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(rows), tags=tags)
    batch = KVBatchMeta(partition_id=partition, keys=keys, tags=tags)
    batch = upsample_batch_to_divisible_size(batch, multiple, END_ID)
    log_probs += [{name: torch.zeros(1) for name in log_probs[0]}] * (len(batch) - len(outputs))
    tq.kv_batch_put(keys=batch.keys, partition_id=partition, fields=list_of_dict_to_tensordict(log_probs))
    return batch


def _get(batch: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Every row's fields that an advantage computation reads or writes, by key."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
    stored = set(data.keys())
    found = {name: [row.clone() for row in data[name].unbind()] for name in FIELDS if name in stored}
    return {key: {name: rows[index] for name, rows in found.items()} for index, key in enumerate(batch.keys)}


def main(folder: Path) -> None:
    """Run everything and save the results; an experiment that raises is saved as its traceback."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("cpu:gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    experiments = Experiments(folder)
    plan = {
        "scenario": SCENARIOS,
        "filtered_groups": ("sync", "colocate_async"),
        "later_update": ("fsdp", "fsdp2"),
    }
    results: dict[tuple[str, str], Any] = {}
    for kind, names in plan.items():
        for name in names:
            try:
                results[kind, name] = getattr(experiments, kind)(name)
            except Exception:
                results[kind, name] = traceback.format_exc()
    torch.save(results, folder / "result.pt")
    tq.close()
    ray.shutdown()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
