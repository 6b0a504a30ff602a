"""Planted faults: one line of the package changed, and the test that must fail then.

    python -m tests.mutations [PARTS OF FILES' NAMES]

A third are in formulas, the others in what leads from a formula to a host: fills, shares, rates, means, files. Each is made in
a copy of the project, whose tests run there. A fault that its test does not see survives, and the status is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FAILED = 1
"""pytest's status where tests failed; others say that it ran none."""


class Mutation(NamedTuple):
    file: str
    """Below ``grail_advantage``, or in ``bench`` or ``recipe``."""
    test: str
    """Below ``tests``: a file or a node."""
    old: str
    """Once in the file, within a line."""
    new: str


ROWS = (
    ("weigh", "core/test_weights_by_hand.py::test_against_loops",
     "w.double(), 0.0).sum(", "w, 0.0).sum("),
    ("weigh", "core/test_turns.py::test_no_method_trains_a_masked_row",
     "selected & r.trains & _finite", "selected & _finite"),
    ("answers/span", "core/test_answer_span.py::test_spans_by_hand",
     'boxes[0 if which == "first" else -1]', "boxes[0]"),
    ("methods/saliency", "core/test_weights_by_hand.py::test_a_token_has_the_saliency_of_its_position",
     "[: self.target_positions(row)[1]]", ""),
    ("methods/turns", "core/test_turns.py",
     "(r.advantages != 0) | (scores", "(scores"),
    ("weigh", "core/test_record.py::test_facts_are_those_of_the_responses",
     '"truncated": r.truncated if', '"truncated": r.truncated & (r.advantages != 0) if'),
    ("weigh", "core/test_record.py::test_responses_without_a_token_count_in_no_rate",
     "int((of & written).sum()) / count", "int(of.sum()) / count"),
    ("receipt/check", "core/test_receipt.py",
     "* self.divisor_N1 / batch.ranks", "* self.divisor_N1"),
    ("receipt/check", "core/test_receipt.py::test_the_smallest_factor_that_is_seen",
     "tuple(self.findings), 1 + 2 * self", "tuple(self.findings), 1 + self"),
    ("dump", "test_dump.py::TestWriting::test_a_resumed_run_removes_its_steps_and_nothing_else",
     "if step >= first]", "if step > first]"),
    ("dump", "test_dump.py::TestReading::test_a_table_has_what_was_received_by_key",
     'pc.index_in(table["key"], known["key"].combine_chunks())',
     "pa.array([n if n < len(known) else None for n in range(len(table))])"),
    ("effect", "core/test_metrics.py::test_an_updates_effect_by_hand",
     "credited = known & (advantages != 0)", "credited = known"),
    ("weigh", "core/test_contract.py::test_the_shuffled_control_has_the_same_weights_on_other_tokens",
     'f"{r.step} {key}"', 'f"{key}"'),
    ("model/probe", "core/test_probe.py::test_the_probe_leaves_nothing_behind",
     "= values.copy_(before)", "= values"),
    ("model/hooks", "core/test_hooks.py::test_logits_of_half_precision_are_divided_in_float32",
     "log_softmax(of.float() / temperature", "log_softmax(of / temperature"),
    ("analyze", "view/test_analyze.py::test_advantages",
     "0.0 if alike[of] else reward", "reward"),
    ("reward/_truth", "recipe/test_reward.py::test_the_table_of_verdicts",
     '", ".join(map(normal', '",".join(map(normal'),
    ("reward/_exact", "recipe/test_reward.py::test_the_table_of_verdicts",
     "if all(golds) and _VALUES", "if False and _VALUES"),
    ("view/page", "view/test_page.py::test_numbers_keep_four_digits_and_nothing_else_is_one",
     "_POWERS[3 -", "_POWERS[2 -"),
    ("view/page", "view/test_page.py::test_received_by_epoch_effect_and_mismatch",
     "sampler - old, of_sampler", "old - sampler, of_sampler"),
    ("view/profile", "view/test_page.py::test_profiles_against_a_loop_over_tokens",
     "(2 * rank_R + 1) * BINS", "2 * rank_R * BINS"),
    ("verl_ext/exchange", "verl_ext/test_zero_advantage_by_hand.py",
     "len(shares[rank]) if groups is None else 0", "0"),
    ("verl_ext/exchange", "verl_ext/test_zero_advantage_by_hand.py::test_the_rows_of_a_group_meet_on_one_rank",
     "members.setdefault(group, [])", "members.setdefault(row, [])"),
    ("verl_ext/host", "verl_ext/test_one_step.py::test_the_mean_of_the_runs_loss",
     '("loss_agg_mode", "loss_scale_factor")', '("loss_agg_mode",)'),
    ("verl_ext/host", "verl_ext/test_turns.py::test_several_outputs_of_a_session_are_one_conversation",
     "if last[row] != row else of for", "if False else of for"),
    ("verl_ext/host", "verl_ext/test_one_step.py::test_what_is_truncated",
     'context_length - (engine == "sglang")', "context_length"),
    ("verl_ext/host", "verl_ext/test_one_step.py::test_what_is_truncated",
     "min(most, whole - len(prompt))", "most"),
    ("verl_ext/exchange", "verl_ext/test_zero_advantage_by_hand.py",
     "[FILLER_TOKENS] * (count - len(of_rank))", "[FILLER_TOKENS] * fillers"),
    ("verl_ext/exchange", "verl_ext/test_zero_advantage_by_hand.py",
     'tokens = data["loss_mask"].sum()', 'tokens = kept["loss_mask"].sum()'),
    ("trl_ext/dump", "trl_ext/dump_checks.py",
     "Piece(rows, full, received, update, rank)", "Piece(rows, full, received, 0, rank)"),
    ("trl_ext/trainer", "trl_ext/core_checks.py::test_the_mean_of_the_runs_loss",
     "(len(kept) * most_tokens)", "kept.numel()"),
    ("recipe/run_life/__init__", "run_life/test_run_life.py::test_the_last_checkpoints_of_all_starts_stay",
     "if _step(path) <= global_step]", "]"),
    ("recipe/run_life/__init__", "run_life/test_run_life.py::test_everything_else_defines_a_run",
     "there.keys() | here.keys() if", "there.keys() & here.keys() if"),
    ("recipe/run_life/watch", "run_life/test_watch.py::test_an_engine_is_dead_if_its_server_says_so_twice",
     "if refuses(address) else 0", "if refuses(address) else 1"),
    ("bench/statistics", "bench/test_table.py::test_intervals_above_controls_hold_the_truth",
     "* len(one) for one in sums", "for one in sums"),
)  # fmt: skip
MUTATIONS = [Mutation(*row) for row in ROWS]


def path_of(file: str) -> str:
    return f"{file}.py" if file.split("/")[0] in ("bench", "recipe") else f"grail_advantage/{file}.py"


def copy_of_the_project(folder: Path) -> None:
    """Its files as they are, but for those that git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def status_of(folder: Path, tests: Sequence[str]) -> int:
    """pytest's, of tests in a copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    if tests[0].startswith("trl_ext"):
        environment["PYTHONPATH"] += f"{os.pathsep}{Path(sys.prefix) / 'trl'}"
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"tests/{test}" for test in tests]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode > FAILED:
        print(done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode


def main(*parts: str) -> int:
    chosen = [each for each in MUTATIONS if not parts or any(part in each.file for part in parts)]
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of_the_project(folder)
        for mutation in chosen:
            path = folder / path_of(mutation.file)
            source = path.read_text(encoding="utf-8")
            assert source.count(mutation.old) == 1, f"{path_of(mutation.file)} has not {mutation.old!r} once"
            path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
            caught = status_of(folder, [mutation.test]) == FAILED
            path.write_text(source, encoding="utf-8")
            wrong += not caught
            change = f"{mutation.old} -> {mutation.new or 'nothing'}"
            print(f"{'caught  ' if caught else 'SURVIVES'} {mutation.file}: {change}, by {mutation.test}", flush=True)
        for of_trl in (False, True):  # a test that always fails would see nothing
            tests = sorted({each.test for each in chosen if each.test.startswith("trl_ext") == of_trl})
            if tests and status_of(folder, tests):
                print(f"without a change these must pass: {' '.join(tests)}")
                wrong += 1
    print(f"{len(chosen)} faults; {wrong} to look at")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
