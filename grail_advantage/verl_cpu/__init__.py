"""verl 0.9.1 on a machine without an accelerator: FSDP over gloo and vLLM's CPU build.

verl has no CPU platform, but it lets others add one. :func:`install` adds it, one concern a module:

=====================  ==============================================================================================
``environment``        environment variables that Ray, vLLM and verl read, with defaults for this machine
``platform``           verl's device abstraction; ``device_module`` stands in for ``torch.cuda``
``process_group``      patch: the process group that verl asks for has ``cpu`` in it twice
``fsdp1_sync``         patch: torch refuses to broadcast FSDP1's initial weights from CPU memory
``pinned_memory``      patch: verl keeps the reference policy in pinned memory, which needs an accelerator
``rollout``            vLLM replica whose server and worker reload weights the way vLLM-CPU can
``vllm_worker``        the vLLM worker side of that reload
``replay_buffer``      replay buffer with a configurable polling interval, selected in ``recipe/config/cpu.yaml``
``checkpoint_engine``  weights for the separate trainer's rollout through a file in host memory
``checks``             what this platform cannot do, refused before Ray starts
=====================  ==============================================================================================

It is switched on by ``VERL_PLATFORM=cpu``; the plugin entry point calls :func:`install` in every process that
imports verl, so Ray workers need nothing else.
"""

from __future__ import annotations

_installed = False


def install() -> None:
    """Register the CPU platform, its rollout replica and its patches with verl; calling it again changes nothing.

    Runs while ``import verl`` is finishing, in every process, so it imports neither vLLM nor FSDP.
    """
    global _installed
    if _installed:
        return

    from grail_advantage.verl_cpu import environment, fsdp1_sync, pinned_memory, platform, process_group, rollout

    environment.apply_defaults()
    platform.register()
    process_group.patch()
    fsdp1_sync.patch()
    pinned_memory.patch()
    rollout.register()
    _installed = True
