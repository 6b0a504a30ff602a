"""Planted faults: one change in one function, and the test that must fail then.

    python -m tests.mutations [PARTS OF FILES, FUNCTIONS, CHANGES AND TESTS]

A change is told by what it means, so that it outlives other names of locals and another form of the function. It is a pattern
of Python and what takes its place: a single capital letter stands for any expression, ``...`` for the other arguments of a
call. The pattern must be in the function exactly once; without a function, in the module.

Faults are made in copies of the project, whose tests run there, each in a fork of a process that has imported torch and verl,
or TRL. A fault that its test does not see survives, and the status is 1.
"""

import ast
import copy
import gc
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FAILED = 1
"""pytest's status where tests failed; others say that it ran none."""
SECONDS = 1200
"""After which a test is taken to hang; a fault that makes it hang is seen."""
IMPORTED = (
    "peft",
    "hypothesis",
    "verl.trainer.main_ppo",
    "verl.workers.engine_workers",
    "verl.trainer.ppo.v1",
)
FORK = multiprocessing.get_context("fork")
NO_PLUGINS = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
"""So that verl is imported without this project, of which each fork imports a copy."""


class Fault(NamedTuple):
    where: str
    change: str
    test: str

    @property
    def file(self) -> str:
        return self.where.partition("::")[0]

    @property
    def of_trl(self) -> bool:
        return self.test.startswith("trl_ext")


TABLE = r"""
# --- What a trainer hands to the worker
grail_advantage/verl_ext/host.py::WeighingTrainer.scores
    # A pass at temperature 1.
    build_request(..., temperature=A) => build_request(..., temperature=1.0)
        verl_ext/test_hosts.py
    # A pass in step 0.
    build_request(..., step=A) => build_request(..., step=0)
        verl_ext/test_hosts.py
    # A pass without a padding token.
    build_request(..., pad_token=A) => build_request(..., pad_token=None)
        verl_ext/test_hosts.py
    # A pass for one rank.
    data_parallel_size(A) => 1
        verl_ext/test_one_step.py::test_a_group_meets_on_a_rank_and_copies_that_fill_one_up_belong_to_none
    # A pass deals groups out.
    A if B.whole_groups else None => None
        verl_ext/test_one_step.py::test_a_group_meets_on_a_rank_and_copies_that_fill_one_up_belong_to_none
    # A copy belongs to a group.
    replace(A, group=-1) => A
        verl_ext/test_one_step.py::test_a_group_meets_on_a_rank_and_copies_that_fill_one_up_belong_to_none
grail_advantage/verl_ext/host.py::_rollouts
    # A record in step 0.
    Rollouts(..., step=A) => Rollouts(..., step=0)
        verl_ext/test_hosts.py
    # A record with the mean over all tokens.
    Rollouts(..., mean=A) => Rollouts(...)
        verl_ext/test_one_step.py::test_the_mean_of_the_runs_loss
    # A group is a session.
    A["prompt"].factorize() => A["session"].factorize()
        verl_ext/test_turns.py
    # A run's own format of answers is lost.
    Rollouts(..., answer=A) => Rollouts(...)
        verl_ext/test_one_step.py::test_answers_in_another_format
    # Responses without a run's keys.
    Rollouts(..., keys=A) => Rollouts(...)
        verl_ext/test_step_dump.py::TestFacts::test_facts_of_the_data_and_of_the_reward_function
grail_advantage/verl_ext/host.py::mean_of_loss
    # The mean of a loss without its factor.
    agg_loss(..., loss_scale_factor=A) => agg_loss(...)
        verl_ext/test_one_step.py::test_the_mean_of_the_runs_loss
grail_advantage/verl_ext/trainer.py::_log_probs_now
    # The effect at temperature 1.
    self.settings[A] => 1.0
        verl_ext/test_step_dump.py::TestReceived::test_the_effect_is_the_change_since_the_old_log_probabilities
grail_advantage/verl_ext/dump.py::UpdateDump.__init__
    # A dump of temperature 1.
    StepDump(..., temperature=A) => StepDump(..., temperature=1.0)
        verl_ext/test_step_dump.py::TestFacts::test_facts_of_the_data_and_of_the_reward_function
grail_advantage/verl_ext/trainer.py::_compute_advantage
    # Every update is the step's first.
    self._report(..., update=A) => self._report(..., update=0)
        verl_ext/test_step_dump.py::TestFacts::test_every_so_many_steps_and_rows_of_every_update
grail_advantage/verl_ext/trainer.py::_init_dataloader
    # Every update writes the step's responses.
    self._look_at_data(updates=A) => self._look_at_data(updates=1)
        verl_ext/test_step_dump.py::TestFacts::test_every_so_many_steps_and_rows_of_every_update
grail_advantage/verl_ext/dump.py::UpdateDump.receive
    # Every receipt is of the step's first update.
    record_of(A, B, C, D) => record_of(A, B, C, 0)
        verl_ext/test_step_dump.py::TestReceived::test_a_fault_is_found
    # Any finding is a mismatch.
    sum(A.mismatch for A in B) => sum(1 for A in B)
        verl_ext/test_step_dump.py::TestReceived::test_a_loss_without_a_formula_is_no_mismatch
grail_advantage/verl_ext/trainer.py::TokenWeightTrainerSeparateAsync._on_policy
    # Later updates are on policy.
    A and self.local_trigger_step == 0 => A
        verl_ext/test_step_dump.py::TestReceived::test_a_fault_is_found
grail_advantage/verl_ext/host.py::_on_policy
    # A run in bypass mode is on policy.
    not A => True
        verl_ext/test_step_dump.py::TestReceived::test_ratios_and_epochs
grail_advantage/verl_ext/trainer.py::_update_actor
    # Every response went into the update.
    self._receive(A, B, C) => self._receive(A, B, [True] * len(C))
        verl_ext/test_step_dump.py::TestReceived::test_what_arrives_is_what_was_intended
    # An update for one rank.
    update_order(A, B, C, D, E) => update_order(A, B, C, D, 1)
        verl_ext/test_one_step.py::TestLeavingOut
grail_advantage/verl_ext/dump.py::receipt_of
    # A receipt divides by the written responses.
    Batch(..., totals_U2=A) => Batch(...)
        verl_ext/test_step_dump.py::TestReceived::test_part_of_the_responses_are_written_and_all_count
grail_advantage/verl_ext/host.py::_reward_field
    # Rewards before the penalty.
    A if B else C => C
        verl_ext/test_turns.py::test_rewards_are_those_after_a_penalty_in_the_reward
grail_advantage/verl_ext/ray_trainer.py::_get_gen_batch
    # Columns of the first step stay.
    self._columns = A => self._columns = self._columns or A
        verl_ext/test_ray_trainer.py::test_a_column_of_the_data_set_is_that_of_the_steps_prompts
grail_advantage/verl_ext/settings.py::Settings.longest
    # A probe as long as prompt and response.
    min(A, B) => A
        verl_ext/test_one_step.py::test_responses_are_left_out_where_no_rank_finds_that_they_depend_on_others
grail_advantage/trl_ext/trainer.py::_rollouts
    # TRL's record in step 0.
    Rollouts.from_padded(..., step=A) => Rollouts.from_padded(..., step=0)
        trl_ext/core_checks.py::test_every_step_is_weighed_by_its_number
    # A response that ends in padding is truncated.
    [*self.eos_token_ids, A] => [*self.eos_token_ids]
        trl_ext/core_checks.py::test_a_response_that_ends_in_padding_is_as_little_truncated_as_for_trl
grail_advantage/trl_ext/dump.py::Generation.pieces
    # TRL's updates are one.
    Piece(A, B, C, D, E) => Piece(A, B, C, 0, E)
        trl_ext/dump_checks.py
grail_advantage/trl_ext/trainer.py::loss_mean
    # Dr_grpo divides by the batch's width.
    len(A) * B => A.numel()
        trl_ext/core_checks.py::test_the_mean_of_the_runs_loss

# --- Ranks that must agree
grail_advantage/verl_ext/host.py::_probe
    # The first rank's finding is that of all.
    max(A, key=B) => A[0]
        verl_ext/test_one_step.py::test_responses_are_left_out_where_no_rank_finds_that_they_depend_on_others
grail_advantage/model/hugging_face.py::_independent
    # A rank keeps its finding.
    replace(A, difference=B) => A
        core/test_together.py::test_rows_run_alone_where_another_ranks_model_does_not_take_them_together
grail_advantage/weigh.py::deal
    # Ranks get any number of responses.
    len(A) if B is None else 0 => 0
        verl_ext/test_zero_advantage_by_hand.py
    # A group is on several ranks.
    A.setdefault(B, []) => A.setdefault(len(A), [])
        verl_ext/test_zero_advantage_by_hand.py::test_the_rows_of_a_group_meet_on_one_rank
grail_advantage/verl_ext/exchange.py::without_zero_advantage
    # Ranks fill up alike.
    [FILLER_TOKENS] * (A - len(B)) => [FILLER_TOKENS] * (A - 1)
        verl_ext/test_zero_advantage_by_hand.py
    # A loss divided by its first response.
    A["loss_mask"].sum() => A["loss_mask"].unbind()[0].sum()
        verl_ext/test_zero_advantage_by_hand.py
grail_advantage/receipt/arrived.py::Arrived.__init__
    # Gradients are no means over ranks.
    A / B.ranks => A
        core/test_receipt.py

# --- What is kept, and its keys
grail_advantage/verl_ext/worker.py::optimiser_step
    # An update that nobody took stays.
    A != self._number => self._number is None
        verl_ext/test_step_dump.py::TestReceived::test_a_receipt_is_of_its_own_update_and_given_out_once
    # Verl's scale stays in gradients.
    A.get_scale() => 1.0
        verl_ext/test_step_dump.py::TestReceived::test_the_scale_of_losses_in_float16_is_divided_out
grail_advantage/verl_ext/worker.py::UpdateReader.take
    # A receipt is given out twice.
    self._begin(None) => pass
        verl_ext/test_step_dump.py::TestReceived::test_a_receipt_is_of_its_own_update_and_given_out_once
    # A receipt of another update.
    A != B => False
        verl_ext/test_step_dump.py::TestReceived::test_a_receipt_is_of_its_own_update_and_given_out_once
grail_advantage/dump.py::remove_steps
    # A resumed step stays.
    A >= B => A > B
        test_dump.py::TestWriting::test_a_resumed_run_removes_its_steps_and_nothing_else
grail_advantage/dump.py::DumpFile.table
    # What was received is joined by place.
    pc.index_in(A, B) => pa.array([n if n < len(B) else None for n in range(len(A))])
        test_dump.py::TestReading::test_a_table_has_what_was_received_by_key
grail_advantage/verl_ext/host.py::_fields
    # Each output of a session has the session's list.
    dict.fromkeys(A) => A
        verl_ext/test_turns.py::test_several_outputs_of_a_session_are_one_conversation
grail_advantage/data.py::turns_before
    # Turns before a response are those of one.
    A[B] + C => C
        verl_ext/test_step_dump.py::TestFacts::test_a_list_for_a_session_goes_on_with_each_of_its_outputs
grail_advantage/data.py::conversations
    # Outputs of a session in any order.
    sorted(A) => A
        core/test_turns.py
grail_advantage/model/probe.py::_without_a_trace
    # A probe leaves buffers changed.
    A.copy_(B) => A
        core/test_probe.py::test_the_probe_leaves_nothing_behind
recipe/run_life/__init__.py::on_save
    # Checkpoints of later steps go.
    _step(A) <= B => True
        run_life/test_run_life.py::test_the_last_checkpoints_of_all_starts_stay
recipe/run_life/__init__.py::_differing
    # A new option defines no run.
    A.keys() | B.keys() => A.keys() & B.keys()
        run_life/test_run_life.py::test_everything_else_defines_a_run
recipe/run_life/trainer.py::fit
    # Every start validates.
    self.global_steps == 0 or A => True
        run_life/test_run_life.py::test_the_first_start_alone_validates_before_training
grail_advantage/verl_ext/entry.py::
    # Two runs write into a dump.
    hold(settings.dump.folder, A, B) => None
        verl_ext/test_checks.py::test_verls_own_command_locks_the_dumps_folder

# --- Precision, and scales of float16
grail_advantage/trl_ext/dump.py::see
    # TRL's scale stays in gradients.
    A.get_scale() => 1.0
        trl_ext/dump_checks.py::test_the_scale_of_losses_in_float16_is_divided_out
grail_advantage/weigh.py::_normalized
    # A response's weights sum in float32.
    torch.where(A, B.double(), 0.0) => torch.where(A, B, 0.0)
        core/test_weights_by_hand.py::test_against_loops
grail_advantage/model/hooks.py::_distributions
    # Logits are divided in half precision.
    A.float() / B => A / B
        core/test_hooks.py::test_logits_of_half_precision_are_divided_in_float32
grail_advantage/receipt/check.py::Comparison.receipt
    # The smallest factor that is seen.
    1 + 2 * self.precision => 1 + self.precision
        core/test_receipt.py::test_the_smallest_factor_that_is_seen

# --- Seeds
grail_advantage/weigh.py::_order
    # Every step has the same control.
    A.step => 0
        core/test_contract.py::test_the_shuffled_control_has_the_same_values_on_other_tokens
grail_advantage/methods/oar.py::_gradient
    # Every step has the same noise.
    noise_seed(A, B, C) => noise_seed(A, 0, C)
        core/test_oar.py
    # Every seed has the same noise.
    noise_seed(A, B, C) => noise_seed(0, B, C)
        core/test_oar.py
recipe/evaluate/sampling.py::draw
    # Samples of a problem have one seed.
    KEY[:3] => KEY[:2]
        recipe/test_evaluate.py::test_every_sample_has_a_seed_of_its_own

# --- Boundaries
grail_advantage/answers/missing.py::AnswerCheck.look
    # One response more before a run stops.
    A >= ENOUGH => A > ENOUGH
        core/test_answer_format.py
grail_advantage/answers/missing.py::is_low
    # A fifth of the answers is few.
    A < B => A <= B
        core/test_answer_format.py
grail_advantage/data.py::within_range
    # The largest advantage trains nothing.
    abs(A) <= LARGEST => abs(A) < LARGEST
        core/test_weights_by_hand.py::test_a_reward_trains_up_to_the_largest
grail_advantage/api.py::_check_model
    # A tenth of unknown tokens is refused.
    A <= MOST_UNKNOWN => A < MOST_UNKNOWN
        core/test_doors.py::test_a_tenth_of_a_response_may_be_unknown_to_the_tokenizer
grail_advantage/data.py::outcome_of
    # A reward of 0 is right.
    A > 0 => A >= 0
        core/test_weights_by_hand.py::test_a_reward_is_right_above_0
grail_advantage/verl_ext/host.py::truncated
    # SGLang has all positions.
    A - (B == "sglang") => A
        verl_ext/test_one_step.py::test_what_is_truncated
    # A long prompt leaves room.
    min(A, B - len(C)) => A
        verl_ext/test_one_step.py::test_what_is_truncated
recipe/run_life/watch.py::
    # An engine is dead at once.
    A if refuses(B) else 0 => A if refuses(B) else 1
        run_life/test_watch.py::test_an_engine_is_dead_if_its_server_says_so_twice
grail_advantage/reward/_truth.py::check_ground_truths
    # A data set with one usable ground truth is refused.
    len(A) > row => len(A) >= row
        recipe/test_ground_truths.py::test_rows_of_a_data_set_are_named_once

# --- Labels and figures
grail_advantage/weigh.py::_no_scores
    # Truncated, though not masked.
    A is not None and B.mask_truncated => A is not None
        core/test_record.py::test_a_truncated_response_that_is_not_masked_has_the_reason_of_any_other
    # Truncated, with an advantage alone.
    A("truncated", B.truncated) => A("truncated", B.truncated & (B.advantages != 0))
        core/test_record.py::test_facts_are_those_of_the_responses
grail_advantage/weigh.py::_rates
    # Empty responses count in rates.
    A.truncated[B] => A.truncated
        core/test_record.py::test_responses_without_a_token_count_in_no_rate
grail_advantage/effect.py::moved_with_advantage
    # Tokens without advantage have a direction.
    A & (B != 0) => A
        core/test_metrics.py::test_an_updates_effect_by_hand
grail_advantage/view/page.py::json_arrays
    # Numbers of three digits.
    10.0 ** (3 - A) => 10.0 ** (2 - A)
        view/test_page.py::test_numbers_keep_four_digits_and_nothing_else_is_one
grail_advantage/view/page.py::_columns
    # The mismatch has the other sign.
    (A - B, C) => (B - A, C)
        view/test_page.py::test_received_by_epoch_effect_and_mismatch
grail_advantage/view/profile.py::profiles
    # A profile counts from the left edge.
    2 * A + 1 => 2 * A
        view/test_page.py::test_profiles_of_masked_and_short_responses

# --- Rules and formulas
grail_advantage/trl_ext/rules.py::
    # A router's loss without a response.
    A["aux_loss_enabled"] => False
        trl_ext/core_checks.py::test_no_response_is_left_out_of_the_loss_of_a_router
grail_advantage/weigh.py::_given_advantages
    # Given advantages train masked responses.
    A & B.trains => A
        core/test_weights_by_hand.py::test_given_advantages
grail_advantage/answers/span.py::
    # The last answer is the first.
    0 if A == "first" else -1 => 0
        core/test_answer_span.py::test_spans_by_hand
grail_advantage/methods/saliency.py::Saliency.prepare
    # A row is not cut after its target.
    A[: self.target_positions(B)[1]] => A
        core/test_weights_by_hand.py::test_a_row_is_cut_after_its_target_and_has_the_norms_of_its_gradients
grail_advantage/methods/sessions.py::
    # A response whose turns have nothing else is left out.
    (A.advantages != 0) | B => B
        core/test_turns.py
grail_advantage/analyze/command.py::advantages_of
    # Equal rewards leave an advantage.
    0.0 if A else B => B
        view/test_analyze.py::test_advantages
grail_advantage/reward/_truth.py::_text
    # A list of golds without blanks.
    ", ".join(A) => ",".join(A)
        recipe/test_reward.py::test_the_table_of_verdicts
grail_advantage/reward/_exact.py::same_label
    # A number is right beside a label.
    A and re.fullmatch(B, C) and D => False
        recipe/test_reward.py::test_the_table_of_verdicts
bench/statistics.py::
    # Intervals forget the number of clusters.
    A.sum() * len(B) => A.sum()
        bench/test_table.py::test_intervals_above_controls_hold_the_truth
"""
"""Below each ``file::function`` its changes, ``pattern => what takes its place``, each above the test that sees it."""
_ROW = re.compile(
    r"^(?P<where>\S+)$|^ {4}(?P<change>[^ #].*)\n {8}(?P<test>.*)", re.MULTILINE
)


def faults_of(table: str) -> list[Fault]:
    """Those of a table like :data:`TABLE`, whose lines with ``#`` say what a change means."""
    faults = []
    where = ""
    for row in _ROW.finditer(table):
        where = row["where"] or where
        if row["change"]:
            faults.append(Fault(where, row["change"], row["test"]))
    return faults


FAULTS = faults_of(TABLE)


def is_any(node: ast.AST) -> bool:
    """Whether a node of a pattern stands for any expression."""
    return isinstance(node, ast.Name) and len(node.id) == 1 and node.id.isupper()


def is_rest(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def parsed(text: str) -> ast.AST:
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def matches(pattern, node, holes: dict[Any, Any]) -> bool:
    """Whether a node, a list of nodes or a name has the form of a pattern. What letters and ``...`` stand for goes into
    ``holes``."""
    if isinstance(pattern, ast.AST) and is_any(pattern):
        holes[pattern.id] = node
        return isinstance(node, ast.expr)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        # Also of lists with other lengths: the tails that zip() leaves out are none of a match.
        pairs = zip(pattern, node, strict=False)
        return len(pattern) == len(node) and all(matches(*pair, holes) for pair in pairs)
    if not isinstance(pattern, ast.AST):
        return pattern == node
    fields = {name: getattr(node, name, None) for name in pattern._fields if name != "ctx"}
    if isinstance(pattern, ast.Call) and any(map(is_rest, pattern.args)):
        # Of `f(A, ..., step=B)` and `f(x, y, z=1, step=2)` the rest is `y, z=1`.
        count = len(pattern.args) - 1
        names = {keyword.arg for keyword in pattern.keywords}
        named = [keyword for keyword in node.keywords if keyword.arg in names]
        rest = [keyword for keyword in node.keywords if keyword not in named]
        holes[...] = (node.args[count:], rest)
        fields["args"] = [*node.args[:count], pattern.args[-1]]
        fields["keywords"] = named
    return all(
        matches(getattr(pattern, name), value, holes) for name, value in fields.items()
    )


class Filled(ast.NodeTransformer):
    """Puts what letters and ``...`` stand for in their places."""

    def __init__(self, holes: dict[Any, Any]):
        self.holes = holes

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.holes[node.id]) if is_any(node) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if any(map(is_rest, node.args)):
            arguments, keywords = self.holes[...]
            node.args = [
                argument for argument in node.args if not is_rest(argument)
            ] + arguments
            node.keywords += keywords
        return node


class Planted(ast.NodeTransformer):
    def __init__(self, place: ast.AST, change: ast.AST):
        self.place = place
        self.change = change

    def visit(self, node: ast.AST) -> ast.AST:
        return self.change if node is self.place else self.generic_visit(node)


def planted(source: str, fault: Fault) -> str:
    """A module's source with the fault. LookupError: its function or its pattern is not there exactly once."""
    tree = scope = ast.parse(source)
    for name in filter(None, fault.where.partition("::")[2].split(".")):
        scope = only(
            [node for node in ast.walk(scope) if getattr(node, "name", None) == name],
            fault.where,
        )
    pattern_text, _, change_text = fault.change.partition(" => ")
    pattern = parsed(pattern_text)
    places = []
    for node in ast.walk(scope):
        holes = {}
        if matches(pattern, node, holes):
            places.append((node, holes))
    place, holes = only(places, f"{fault.where}: {pattern_text}")
    change = Filled(holes).visit(parsed(change_text))
    return ast.unparse(ast.fix_missing_locations(Planted(place, change).visit(tree)))


def only(places: list[Any], name: str):
    if len(places) != 1:
        raise LookupError(f"{name} is there {len(places)} times")
    return places[0]


def run_tests(folder: Path, tests: set[str]):
    """pytest on a copy of the project, in a fork."""
    import pytest

    os.chdir(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path[1:]])
    for name in NO_PLUGINS:
        del os.environ[name]
    with (folder / "output.txt").open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.path[0] = str(folder)
    # The copy's own tests are imported, and not those that started this.
    for name in list(sys.modules):
        if name.partition(".")[0] == "tests":
            del sys.modules[name]
    if "verl" in sys.modules:
        for plugin in entry_points(group="verl.plugins"):
            plugin.load()
    options = ["-qx", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not nightly"]
    # A row may name several files.
    names = " ".join(sorted(tests)).split()
    sys.exit(pytest.main(options + [f"tests/{name}" for name in names]))


def status_of(folder: Path, *tests: str) -> int | None:
    """pytest's, or ``None`` where it hangs."""
    process = FORK.Process(target=run_tests, args=(folder, set(tests)))
    process.start()
    process.join(SECONDS)
    status = process.exitcode
    process.kill()
    process.join()
    if status not in (0, FAILED):
        print((folder / "output.txt").read_text()[-2000:])
    return status


def run(faults: list[Fault]):
    """Plant faults one after another; the status of the process is how many are to be looked at."""
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        listed = "git ls-files -z --cached --others --exclude-standard"
        copied = f"{listed} | xargs -0 cp --parents --target-directory {name}"
        subprocess.run(copied, shell=True, cwd=ROOT, check=True)
        for fault in faults:
            path = folder / fault.file
            source = path.read_text()
            path.write_text(planted(source, fault))
            survives = status_of(folder, fault.test) not in (FAILED, None)
            path.write_text(source)
            survivors += survives
            outcome = "SURVIVES" if survives else "caught  "
            print(outcome, f"{fault.where}: {fault.change}, by {fault.test}", flush=True)
        # A test that always fails would see nothing.
        tests = [fault.test for fault in faults]
        if status_of(folder, *tests):
            print(f"without a fault these must pass: {' '.join(tests)}")
            survivors += 1
    sys.exit(survivors)


def main(*parts: str) -> int:
    chosen = [
        fault
        for fault in FAULTS
        if not parts or any(part in " ".join(fault) for part in parts)
    ]
    # Before an hour of tests.
    for fault in chosen:
        planted((ROOT / fault.file).read_text(), fault)
    trl = find_spec("trl") is not None
    faults = [fault for fault in chosen if fault.of_trl == trl]
    survivors = 0
    os.environ.update(NO_PLUGINS)
    for module in ("trl",) if trl else IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    count = min(int(os.environ.get("TEST_PROCESSES", 2)), len(faults))
    shares = [
        FORK.Process(target=run, args=(faults[place::count],)) for place in range(count)
    ]
    for share in shares:
        share.start()
    for share in shares:
        share.join()
        survivors += share.exitcode or 0
    # TRL has an environment of its own.
    if len(faults) < len(chosen) and not trl:
        path = os.pathsep.join(
            [str(Path(sys.prefix) / "trl"), str(ROOT / "packages/verl-cpu")]
        )
        command = [sys.executable, "-m", "tests.mutations", *parts]
        environment = {**os.environ, "PYTHONPATH": path}
        survivors += subprocess.run(command, cwd=ROOT, env=environment).returncode
    print(f"{len(faults)} faults; {survivors} to look at")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
