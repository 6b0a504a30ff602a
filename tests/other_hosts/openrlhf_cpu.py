"""OpenRLHF's own command on CPU cores, with token weights: ``python -m tests.other_hosts.openrlhf_cpu FLAGS``.

Real are OpenRLHF's trainer, experience maker, workers, replay buffer and loss, DeepSpeed and Ray. Replaced are calls of
CUDA, the DeepSpeed extensions that would be compiled, flash-attn, and vLLM with its copy of the weights: Hugging Face's
``generate`` writes the responses. In ``RECORD``, a folder, each step leaves its batch and each update its policy."""

import copy
import json
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

# The step from which one advantage a response reaches the loss, which a receipt must find
FIRST_FAULT = 2


def stub(name: str, **members):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(members)
    sys.modules[name] = module


def patch_process():
    """In every process of Ray, before it imports OpenRLHF."""
    from torch.distributed import device_mesh

    nothing = lambda *_, **__: None  # noqa: E731
    stub("vllm", __version__="0.29.0", SamplingParams=SimpleNamespace)
    stub("vllm.inputs", TokensPrompt=dict)
    stub("vllm.utils", random_uuid=nothing)
    stub("flash_attn", __version__="2.8.3")
    names = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    stub("flash_attn.bert_padding", **dict.fromkeys(names, nothing))
    stub("flash_attn.utils")
    stub("flash_attn.utils.distributed", all_gather=nothing)
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize", "empty_cache"):
        # Each its own, by which torch's compiler tells them apart
        setattr(torch.cuda, name, lambda *_: None)
    init_device_mesh = device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda kind, *rest, **named: init_device_mesh(
        "cpu", *rest, **named
    )

    from openrlhf.trainer.ppo_utils import replay_buffer
    from openrlhf.trainer.ray import ppo_actor
    from openrlhf.utils.deepspeed import deepspeed as strategy

    from examples.hosts import openrlhf

    import_module("deepspeed.comm.torch").build_shm_op = nothing
    get_train_ds_config = strategy.get_train_ds_config

    def config(*arguments, **named):
        ds_config = get_train_ds_config(*arguments, **named)
        if "optimizer" in ds_config:
            ds_config["optimizer"]["params"]["torch_adam"] = True
        return ds_config

    strategy.get_train_ds_config = config
    # It writes f"cuda:{...}" (replay_buffer.py:40).
    replay_buffer.torch = SimpleNamespace(
        **{**vars(torch), "device": lambda _: torch.device("cpu")}
    )
    ppo_actor.ActorPPOTrainer._init_vllm_sync_group = nothing
    ppo_actor.ActorPPOTrainer.broadcast_to_vllm = copy_weights
    record_steps(openrlhf.TokenWeightExperienceMaker)
    plant_fault(ppo_actor.ActorPPOTrainer)


def copy_weights(trainer):
    """The policy to the engine, in place of ActorPPOTrainer.broadcast_to_vllm."""
    import deepspeed
    import ray

    model = trainer.actor.model.module
    is_sharded = trainer.strategy.args.ds.zero_stage == 3
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=is_sharded):
        state = {
            name: values.detach().clone().cpu()
            for name, values in model.state_dict().items()
        }
    if torch.distributed.get_rank() == 0:
        ray.get([engine.load.remote(state) for engine in trainer.vllm_engines])
    torch.distributed.barrier()


def record_steps(maker_class: type):
    """What OpenRLHF's own experience maker gives for a batch, and the advantages that ours gives."""
    weigh_experiences = maker_class.compute_advantages_and_returns
    parent = maker_class.__bases__[0]

    def recorded(maker, experiences):
        copied = copy.deepcopy(experiences)
        unweighted = parent.compute_advantages_and_returns(maker, copied)
        weighed = weigh_experiences(maker, experiences)
        step = [
            (vars(inputs), results.advantages)
            for inputs, results in zip(unweighted, weighed, strict=True)
        ]
        torch.save(step, Path(os.environ["RECORD"], f"step_{maker.step}.pt"))
        return weighed

    maker_class.compute_advantages_and_returns = recorded


def plant_fault(trainer_class: type):
    training_step = trainer_class.training_step

    def flattened(trainer, experience, *arguments, **named):
        mask = experience.action_mask
        # Two optimiser steps a rollout
        if trainer.actor.model.global_steps >= 2 * FIRST_FAULT:
            mean = (experience.advantages * mask).sum(1, keepdim=True) / mask.sum(
                1, keepdim=True
            ).clamp(min=1)
            experience.advantages = mean * mask
        return training_step(trainer, experience, *arguments, **named)

    trainer_class.training_step = flattened


class Engine:
    """What OpenRLHF asks of its ``RolloutRayActor`` (vllm_engine.py:35), with its own executor and reward function."""

    def __init__(self, model: str, seed: int, remote_rm_url: list[str], **_):
        from openrlhf.utils.agent import SingleTurnAgentExecutor
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(seed)
        self.executor = SingleTurnAgentExecutor(remote_rm_url)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.updates = 0

    def load(self, state: dict[str, Any]):
        self.model.load_state_dict(state)
        self.updates += 1
        torch.save(state, Path(os.environ["RECORD"], f"policy_{self.updates}.pt"))

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def generate(
        self, prompt_ids: list[int], sampling, multi_modal_data=None
    ) -> SimpleNamespace:
        ids = torch.tensor([prompt_ids])
        with torch.no_grad():
            row = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_tokens,
            )[0]
        response = row[len(prompt_ids) :].tolist()
        reason = "stop" if response[-1] == self.tokenizer.eos_token_id else "length"
        output = SimpleNamespace(token_ids=response, finish_reason=reason, logprobs=None)
        return SimpleNamespace(outputs=[output])

    async def generate_responses(
        self, *, max_length: int, num_samples: int, images, **named
    ) -> list[Any]:
        named["max_length"] = max_length
        named["llm_engine"] = self
        return [await self.executor.execute(**named) for _ in range(num_samples)]


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], **_
) -> dict[str, Any]:
    """1 where the last box holds the answer; OpenRLHF loads it from this file."""
    from verl_cpu.tiny.task import boxed_answer

    rewards = [
        float(boxed_answer(query.removeprefix(prompt)) == label)
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    return {"rewards": torch.tensor(rewards), "scores": torch.tensor(rewards)}


def main():
    """The command; with a file of commands in its place the errors of each, which must come before Ray starts."""
    patch_process()
    import ray
    from openrlhf.trainer.ray import vllm_engine

    from examples.hosts import openrlhf

    if len(sys.argv) == 2:
        for flags in json.loads(Path(sys.argv[1]).read_text()):
            sys.argv[1:] = flags
            try:
                openrlhf.main()
            except ValueError as error:
                print("ValueError:", error)
        return

    vllm_engine.RolloutRayActor = ray.remote(Engine)
    # Few CPUs: Ray starts a process for each, and each imports everything.
    ray.init(
        num_cpus=4,
        num_gpus=4,
        include_dashboard=False,
        object_store_memory=2**28,
        runtime_env={
            "worker_process_setup_hook": "tests.other_hosts.openrlhf_cpu.patch_process"
        },
    )
    openrlhf.main()


if __name__ == "__main__":
    # By a name under which other processes find its classes
    from tests.other_hosts import openrlhf_cpu

    openrlhf_cpu.main()
