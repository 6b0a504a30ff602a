"""The table of docs/compatibility.md, and its one source.

``python scripts/layout_table.py`` prints the table, ``--write docs/compatibility.md`` puts it between the markers
``<!-- layouts -->`` and ``<!-- /layouts -->`` of that file. ``tests/verl_ext/test_layout_table.py`` checks that each refused
cell raises its message at start-up, and that the page holds this table.

To add a cell, add a line to ``CELLS``. A cell holds for a row of options at its defaults (fsdp2, ``sync``, ...) unless its
tests say more.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from recipe.marked_text import write_marked

MARKER = "layouts"

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
MODE = "trainer.v1.trainer_mode"
CORRECTION = "algorithm.rollout_correction"

METHODS = "tests/verl_ext/test_methods_run.py"
PASS = "tests/verl_ext/test_passes.py::TestEverySetup"
MEMORY = "tests/verl_ext/test_pass_details.py::TestMemory"
HALVED = "tests/verl_ext/test_pass_details.py::TestHalfPrecision"
TRAINER = "tests/verl_ext/test_layouts.py::TestEveryScenario"
SEPARATED = "tests/verl_ext/test_layouts_run.py"
GPU = "tests/verl_ext/test_layouts_gpu.py"


@dataclass(frozen=True)
class Tested:
    """Supported; ``tests`` are pytest node ids or their beginnings.

    ``path[name]`` means the parameter sets of that path whose id is ``name`` or begins with ``name:`` or ``name-``.
    """

    option: str
    value: str
    tests: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class OnGpu(Tested):
    """Supported, but its tests need a GPU and are skipped elsewhere."""


@dataclass(frozen=True)
class Refused:
    """``overrides`` of the published configuration raise a ValueError that begins with ``message``, before Ray starts.

    With ``cpu`` the refusal belongs to the CPU platform, and the configuration is that of a CPU run. With ``recipe`` it belongs
    to ``recipe.main_grail``, and verl's own command starts.
    """

    option: str
    value: str
    overrides: tuple[str, ...]
    message: str
    cpu: bool = False
    recipe: bool = False


Cell = Tested | Refused

SEPARATE_ASYNC = (
    f"{MODE}=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=1",
    f"{ROLLOUT}.checkpoint_engine.backend=nccl",
)

FUSED_KERNELS = (f"{MODEL}.use_fused_kernels=True", f"{ACTOR}.strategy=fsdp")

CELLS: tuple[Cell, ...] = (
    Tested("`actor.strategy`", "`fsdp`", (f"{PASS}[fsdp]",)),
    Tested("`actor.strategy`", "`fsdp2`", (f"{PASS}[fsdp2]", METHODS)),
    Refused(
        "`actor.strategy`",
        "any other",
        (f"{ACTOR}.strategy=megatron",),
        f"{ACTOR}.strategy=megatron does not work with algorithm.adv_estimator=grail",
    ),
    Tested("ranks", "1", (TRAINER, SEPARATED)),
    Tested("ranks", "2", (f"{PASS}[fsdp]", f"{PASS}[fsdp2]", METHODS)),
    Tested("ranks", "3", (f"{PASS}[fsdp, 3 ranks]", f"{PASS}[fsdp2, 3 ranks, packed]")),
    Tested("ranks", "4", (f"{PASS}[fsdp2, 4 ranks, groups of two]", f"{PASS}[fsdp2, 4 ranks, 2 a sequence]")),
    Tested("gradient checkpointing", "on", (f"{PASS}[fsdp]", f"{PASS}[fsdp2]")),
    Tested(
        "gradient checkpointing",
        "off",
        (f"{PASS}[fsdp, tied, no checkpointing]", f"{PASS}[fsdp2, tied, no checkpointing]"),
    ),
    Tested(
        "gradient checkpointing",
        "with verl's activation offload",
        (f"{PASS}[fsdp2, activations offloaded]", f"{MEMORY}[fsdp, activations offloaded]"),
    ),
    Tested(
        "parameter and optimiser offload",
        "on",
        (
            f"{PASS}[fsdp, parameters offloaded]",
            f"{PASS}[fsdp2, parameters offloaded]",
        ),
    ),
    Tested(
        "parameter and optimiser offload",
        "FSDP2's own, `offload_policy`",
        (f"{PASS}[fsdp2, 3 ranks, parameters offloaded by FSDP2]",),
    ),
    Refused(
        "parameter and optimiser offload",
        "parameters, `separate_async` with several updates a step, decoupled",
        (*SEPARATE_ASYNC, f"{ACTOR}.fsdp_config.param_offload=True"),
        f"{ACTOR}.fsdp_config.param_offload=True does not work with {MODE}=separate_async",
        recipe=True,
    ),
    Tested("`use_remove_padding`", "`true`", (f"{PASS}[fsdp, packed]", f"{PASS}[fsdp2, packed]")),
    Tested("`use_remove_padding`", "`true`, `pad_to_length`", (f"{PASS}[fsdp2, packed to a multiple of 64]",)),
    Tested("`use_remove_padding`", "`false`", (f"{PASS}[fsdp]", f"{PASS}[fsdp2]")),
    Tested("micro-batches", "dynamic", (PASS, METHODS)),
    Tested("micro-batches", "of fixed size", (PASS, TRAINER)),
    Tested(
        "sequence parallelism",
        "2, on 2 and 4 ranks",
        (
            f"{PASS}[fsdp, 2 a sequence]",
            f"{PASS}[fsdp2, tied, 2 a sequence]",
            f"{PASS}[fsdp2, 4 ranks, 2 a sequence]",
        ),
        "with a reference attention in place of flash attention, which has no CPU build",
    ),
    Tested(
        "sequence parallelism",
        "4",
        (f"{PASS}[fsdp, 4 ranks, 4 a sequence]",),
        "the same",
    ),
    OnGpu(
        "sequence parallelism",
        "2, with flash attention itself",
        ("tests/verl_ext/test_flash_attention_gpu.py",),
    ),
    Refused(
        "sequence parallelism",
        "without `use_remove_padding`",
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{MODEL}.use_remove_padding=False"),
        f"{ACTOR}.ulysses_sequence_parallel_size=2 does not work with algorithm.adv_estimator=grail; set "
        f"{MODEL}.use_remove_padding=true",
    ),
    Refused(
        "sequence parallelism",
        "with another attention than flash attention",
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", f"+{MODEL}.override_config.attn_implementation=sdpa"),
        f"{ACTOR}.ulysses_sequence_parallel_size=2 does not work with algorithm.adv_estimator=grail; set "
        f"{MODEL}.override_config.attn_implementation",
    ),
    Refused(
        "sequence parallelism",
        "with a method that reads logits or hidden states",
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", "algorithm.adv_estimator=oar_p"),
        f"{ACTOR}.ulysses_sequence_parallel_size=2 does not work with algorithm.adv_estimator=oar_p",
    ),
    Tested("LoRA", "`all-linear`", (f"{PASS}[fsdp, lora]", f"{PASS}[fsdp2, lora]")),
    Tested(
        "LoRA", "on `lm_head`, with `fsdp`", (f"{PASS}[fsdp, lora on the head]", f"{PASS}[fsdp, lora on the tied head]")
    ),
    Tested("LoRA", "on `lm_head`, with `fsdp2` and tied embeddings", (f"{PASS}[fsdp2, lora on the tied head]",)),
    Tested("LoRA", "on the embeddings, with `fsdp`", (f"{PASS}[fsdp, lora on the embeddings]",)),
    Tested(
        "LoRA",
        "beside whole embeddings and head (`modules_to_save`), with `fsdp`",
        (f"{PASS}[fsdp, lora beside whole embeddings and head]",),
    ),
    Tested(
        "LoRA",
        "merged for the rollout",
        ("tests/verl_ext/test_passes.py::test_merged_weights_for_the_rollout_are_the_same",),
    ),
    Refused(
        "LoRA",
        "on `lm_head` or embeddings, with `fsdp2` and untied embeddings, which verl cannot shard",
        (f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj,lm_head]"),
        f"{ACTOR}.strategy=fsdp2 does not work with algorithm.adv_estimator=grail; with a LoRA on lm_head",
    ),
    Refused(
        "LoRA",
        "as an adapter in the rollout, on the CPU platform",
        (f"{MODEL}.lora_rank=8",),
        "a LoRA rank of 8 needs an adapter in the rollout, which the CPU platform does not load; set "
        f"{MODEL}.lora.merge=True",
        cpu=True,
    ),
    Tested(
        "fused kernels",
        "`torch`, with `fsdp`",
        (f"{PASS}[fsdp, fused kernels]", f"{PASS}[fsdp, tied, packed, fused kernels]"),
    ),
    OnGpu("fused kernels", "`triton`, with `fsdp`", (GPU,)),
    Refused(
        "fused kernels",
        "`triton`, on the CPU platform",
        (f"{MODEL}.use_fused_kernels=True", f"{MODEL}.fused_kernel_options.impl_backend=triton"),
        f"{MODEL}.fused_kernel_options.impl_backend=triton has no kernel for the CPU",
        cpu=True,
    ),
    Refused(
        "fused kernels",
        "with `fsdp2`, where verl's own forward fails over untied embeddings",
        (f"{MODEL}.use_fused_kernels=True",),
        f"{MODEL}.use_fused_kernels=True does not work with algorithm.adv_estimator=grail; set {ACTOR}.strategy",
    ),
    Refused(
        "fused kernels",
        "with sequence parallelism",
        (*FUSED_KERNELS, f"{ACTOR}.ulysses_sequence_parallel_size=2"),
        f"{MODEL}.use_fused_kernels=True does not work with algorithm.adv_estimator=grail; set "
        f"{ACTOR}.ulysses_sequence_parallel_size",
    ),
    Refused(
        "fused kernels",
        "with a method that reads logits or hidden states",
        (*FUSED_KERNELS, "algorithm.adv_estimator=oar_g"),
        f"{MODEL}.use_fused_kernels=True does not work with algorithm.adv_estimator=oar_g",
    ),
    Refused(
        "fused kernels",
        "`liger`",
        (*FUSED_KERNELS, f"{MODEL}.fused_kernel_options.impl_backend=liger"),
        f"{MODEL}.fused_kernel_options.impl_backend=liger does not work with algorithm.adv_estimator=grail",
    ),
    Refused(
        "fused kernels",
        "with LoRA on `lm_head`, which verl's fused forward leaves out",
        (*FUSED_KERNELS, f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj,lm_head]"),
        f"{MODEL}.use_fused_kernels=True does not work with algorithm.adv_estimator=grail; leave lm_head out",
    ),
    Tested("embeddings", "tied", (f"{PASS}[fsdp, tied, no checkpointing]", f"{PASS}[fsdp2, tied, no checkpointing]")),
    Tested("embeddings", "untied", (f"{PASS}[fsdp]", f"{PASS}[fsdp2]")),
    Tested("precision", "fp32", (PASS,)),
    Tested("precision", "bf16, autocast and parameters", (HALVED,), "equal to fp32 within bf16's rounding"),
    Refused(
        "precision",
        "fp16",
        (f"+{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp16}}",),
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16 does not work with algorithm.adv_estimator=grail",
    ),
    Tested("`trainer_mode`", "`sync`", (METHODS, f"{TRAINER}[plain]")),
    Tested("`trainer_mode`", "`colocate_async`", (f"{TRAINER}[colocate_async]", f"{TRAINER}[everything]")),
    Tested(
        "`trainer_mode`",
        "`separate_async`, one and several updates a step",
        (
            SEPARATED,
            f"{TRAINER}[separate_async]",
            "tests/verl_ext/test_pass_details.py::test_a_later_update_of_a_step_weighs_by_the_steps_first_policy",
        ),
    ),
    Refused(
        "`trainer_mode`",
        "`separate_async` with `hybrid_engine=false`, which verl 0.9.1 fails to start",
        (*SEPARATE_ASYNC, "actor_rollout_ref.hybrid_engine=False"),
        f"actor_rollout_ref.hybrid_engine=False does not work with {MODE}=separate_async",
        recipe=True,
    ),
    Refused(
        "`trainer_mode`",
        "`separate_async` on the CPU platform with another engine than `host`",
        (*SEPARATE_ASYNC, "trainer.v1.sampler.custom_sampler.path=null", "trainer.v1.sampler.custom_sampler.name=null"),
        f"{ROLLOUT}.checkpoint_engine.backend=nccl needs an accelerator; set it to host",
        cpu=True,
    ),
    Refused(
        "`trainer_mode`",
        "asynchronous on the CPU platform with its `PollingReplayBuffer`",
        (f"{MODE}=colocate_async",),
        f"{MODE}=colocate_async does not work with PollingReplayBuffer",
        cpu=True,
    ),
    Tested("rollout correction", "decoupled, token weights and rejection", (f"{TRAINER}[decoupled, tokens]",)),
    Tested("rollout correction", "decoupled, sequence weights and rejection", (f"{TRAINER}[decoupled, sequences]",)),
    Tested("rollout correction", "bypass", (f"{TRAINER}[bypass]",)),
    Refused(
        "rollout correction",
        "bypass, with a method that reads the entropy",
        ("algorithm.rollout_correction.bypass_mode=True", "algorithm.adv_estimator=entropy"),
        "algorithm.rollout_correction.bypass_mode=True does not work with algorithm.adv_estimator=entropy",
    ),
    Refused(
        "rollout correction",
        "any, with `top_k`, `top_p` below 1, or without `calculate_log_probs`",
        ("algorithm.rollout_correction.rollout_is=token", f"{ROLLOUT}.top_k=50"),
        f"{ROLLOUT}.top_k=50 does not work with algorithm.rollout_correction.rollout_is=token",
        recipe=True,
    ),
    Tested("method", "every one, in a step of a run on 2 ranks", (METHODS,)),
    Refused(
        "method",
        "one that ranks by entropy, in bf16 without chunks",
        (f"{ACTOR}.entropy_from_logits_with_chunking=False", "algorithm.adv_estimator=high_entropy"),
        f"{ACTOR}.entropy_from_logits_with_chunking=False does not work with algorithm.adv_estimator=high_entropy",
    ),
    Tested("KL in reward", "on", (f"{TRAINER}[KL in reward]", f"{TRAINER}[everything]")),
    Tested("reference policy", "KL in reward", (f"{TRAINER}[KL in reward]",)),
    Tested("reference policy", "KL in loss", (SEPARATED,)),
    Tested("outputs a session", "several", (f"{TRAINER}[several outputs]", f"{TRAINER}[everything]")),
    Tested(
        "DAPO group filtering",
        "`sync` and `colocate_async`",
        ("tests/verl_ext/test_layouts.py::test_a_group_without_a_difference_is_replaced_and_the_others_are_weighted",),
    ),
    Refused(
        "DAPO group filtering",
        "on the CPU platform with its `PollingReplayBuffer`",
        ("algorithm.filter_groups.enable=True",),
        "algorithm.filter_groups.enable=True has no effect with PollingReplayBuffer",
        cpu=True,
    ),
    Refused(
        "`rollout.n`",
        "1",
        (f"{ROLLOUT}.n=1",),
        f"{ROLLOUT}.n=1 does not work with algorithm.adv_estimator=grail",
    ),
    Refused(
        "`rollout.temperature`",
        "0",
        (f"{ROLLOUT}.temperature=0",),
        f"{ROLLOUT}.temperature=0 does not work with algorithm.adv_estimator=grail",
    ),
)


def _short(node_id: str) -> str:
    return f"`{node_id.removeprefix('tests/verl_ext/')}`"


def table() -> str:
    """The table in Markdown, without the markers; options stay together in the order of ``CELLS``."""
    lines = ["| option | value | | shown by |", "|---|---|---|---|"]
    previous = ""
    for cell in CELLS:
        if isinstance(cell, Refused):
            verdict = "refused by `recipe.main_grail`" if cell.recipe else "refused"
            shown_by = f"`ValueError: {cell.message} ...`"
        else:
            verdict = "its test needs a GPU and is skipped elsewhere" if isinstance(cell, OnGpu) else "tested"
            shown_by = ", ".join(map(_short, cell.tests)) + (f"; {cell.note}" if cell.note else "")
        lines.append(f"| {cell.option if cell.option != previous else ''} | {cell.value} | {verdict} | {shown_by} |")
        previous = cell.option
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the file's markers")
    arguments = parser.parse_args()
    if arguments.write is None:
        sys.stdout.write(table())
        return
    write_marked(arguments.write, MARKER, table())


if __name__ == "__main__":
    main()
