"""verl's own command, ``python -m verl.trainer.main_ppo``, whose Ray workers are forks of a process that has imported verl and
vLLM, and of this package what verl's plug-in loads. It saves each of them the same imports."""

import os
import runpy
import sys

from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

from verl_cpu.workers import PY_EXECUTABLE, serve

if __name__ == "__main__":
    server = serve({**os.environ, **get_ppo_ray_runtime_env()["env_vars"]})
    sys.argv.append(f"+{PY_EXECUTABLE}='{server}'")
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
