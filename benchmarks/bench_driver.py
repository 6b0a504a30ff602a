"""What the trainer's process does with a step's responses, by stage: all of a run pass through it, however many GPUs train.

    python -m benchmarks.bench_driver --responses 512 1024 --tokens 1024 2048

Rows are made; TransferQueue, verl's trainer class and the token dump are real, and the scores of the pass are random. Prints
seconds of the process's time and its peak of memory for each size, and by million tokens.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import timer
from benchmarks.setup import Setup, prepare_process

PROMPT = 64
INCORRECT = 0.6  # share of the responses that need scores
DUMPED = 64  # responses that the token dump writes


def make_trainer(folder: Path, tokens: int, tokenizer: Any) -> Any:
    """The synchronous trainer as far as the weights need it, without workers and data."""
    import hydra
    from verl.trainer.ppo.v1 import get_trainer_cls

    import grail_advantage.verl_ext.trainer  # noqa: F401  registers the trainers
    from grail_advantage.data import RowScores
    from grail_advantage.verl_ext.dump import UpdateDump

    overrides = [
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={tokens}",
        f"algorithm.token_dump.folder={folder}",
        f"algorithm.token_dump.responses={DUMPED}",
        "algorithm.token_dump.every=1",
    ]
    with hydra.initialize_config_dir(
        str(Path(__file__).parents[1] / "recipe/config"), version_base=None
    ):
        config = hydra.compose("grail_trainer", overrides)
    cls = get_trainer_cls("grail_sync")
    # verl's constructor would want data and workers.
    trainer = cls.__new__(cls)
    trainer.config = config
    trainer._read_settings(config)
    trainer.tokenizer = tokenizer
    trainer._context_length = PROMPT + tokens
    trainer._end_tokens = {tokenizer.eos_token_id}
    trainer.global_steps = 1
    trainer.timing_raw = {}
    trainer._dump = UpdateDump(trainer.settings, tokenizer, updates=1)
    trainer._run_pass = lambda rows: [RowScores(torch.rand(row.length)) for row in rows]
    return trainer


def run(responses: int, tokens: int) -> dict[str, float]:
    """Seconds of each stage for a step of so many responses of so many tokens."""
    import transfer_queue as tq
    from tensordict import TensorDict

    from grail_advantage.verl_ext.exchange import nested

    setup = Setup("cpu", "toy", responses, PROMPT + tokens, PROMPT, 1, packed=False)
    rollouts = setup.rollouts(round(INCORRECT * responses))
    keys = [f"{index // 8}_{index % 8}_0" for index in range(responses)]
    ones = [torch.ones(tokens, dtype=torch.int64) for _ in keys]
    fields = {
        "prompts": rollouts.prompts,
        "responses": rollouts.responses,
        "loss_mask": ones,
        "response_mask": ones,
        "advantages": [torch.full((tokens,), value) for value in rollouts.advantages.tolist()],
        "rm_scores": [torch.zeros(tokens) for _ in keys],
    }
    columns = TensorDict(
        {name: nested(values) for name, values in fields.items()}, batch_size=responses
    )
    tq.kv_batch_put(keys=keys, partition_id="train", fields=columns)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), tokens, rollouts.tokenizer)
        results: dict[str, Any] = {}

        def fetch() -> None:
            results["data"] = tq.kv_batch_get(keys, "train", select_fields=trainer._field_names())

        def answers() -> None:
            results["rollouts"] = trainer._rollouts(keys, results["data"])
            results["rollouts"].spans("last")

        def weights() -> None:
            trainer._weigh(keys, results["data"])

        def put() -> None:
            values = nested([row_T[:tokens] for row_T in trainer._weighed.advantages])
            tq.kv_batch_put(
                keys=keys,
                partition_id="train",
                fields=TensorDict({"advantages": values}, batch_size=responses),
            )

        def dump() -> None:
            trainer._report([True] * responses)

        for stage in (fetch, answers, weights, put, dump):
            seconds[stage.__name__] = timer.seconds("cpu", stage)
    tq.kv_clear(keys=keys, partition_id="train")
    # _weigh() makes the record, and finds the answers, too
    seconds["weights"] -= seconds["answers"]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    args = parser.parse_args()
    prepare_process("cpu")
    import ray
    import transfer_queue as tq

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init()
    rows = {}
    for tokens in args.tokens:
        for responses in args.responses:
            seconds = run(responses, tokens)
            million = responses * tokens / 1e6
            row: dict[str, Any] = {stage: round(value, 3) for stage, value in seconds.items()}
            row["all, for each million tokens"] = round(sum(seconds.values()) / million, 3)
            row["peak so far, GiB"] = round(
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2
            )
            rows[f"{responses} responses of {tokens} tokens"] = row
    print(
        timer.origin("cpu", f"python -m benchmarks.bench_driver {' '.join(sys.argv[1:])}"),
        "",
        sep="\n",
    )
    print(*timer.table(rows), sep="\n")


if __name__ == "__main__":
    main()
