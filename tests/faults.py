"""What may go wrong, where, what becomes of it, and what shows that: the table of docs/faults.md.

To add a fault, add a :class:`Fault` to :data:`FAULTS`, under the section (``about``) where a reader would look for it, and run

    python scripts/fault_table.py

A proof is a test, as pytest names it below ``tests/`` (``recipe/test_reward.py::test_killed_idle_workers_are_replaced``, a
class, or a whole file; parameters in brackets may follow), or the page of a recorded run (``docs/soak/README.md``).
``tests/test_faults.py`` checks that each exists and that the page is the one written last. The outcome is what a user sees, in
one sentence.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One row of the table."""

    about: str
    """The section, one of :data:`SECTIONS`."""
    fault: str
    place: str
    outcome: str
    proof: tuple[str, ...]


PROCESSES, CHECKPOINTS, FILES = "Processes that die or hang", "Checkpoints and resuming", "Dumps, logs and disks"
NODES, NUMBERS, TEXT, SETTINGS = "Nodes and ranks", "Numbers and shapes", "Text and foreign files", "Settings"
SECTIONS = (PROCESSES, CHECKPOINTS, FILES, NODES, NUMBERS, TEXT, SETTINGS)
"""In the order of the page."""

RETRIED = "its problem counts as wrong, the worker is replaced, the run goes on"
WEIGHS_ONE = "the row keeps weight 1 and is counted in `non_finite_rate`; no other row changes"

FAULTS = (
    # -------------------------------------------------------------------------------------------------------- processes
    Fault(
        PROCESSES,
        "killed",
        "a process that judges an answer, idle or at work",
        RETRIED,
        (
            "recipe/test_reward.py::test_killed_idle_workers_are_replaced",
            "recipe/test_reward.py::test_worker_killed_at_work_is_replaced",
        ),
    ),
    Fault(
        PROCESSES,
        "the program is killed",
        "while its children judge answers",
        "no child is left behind",
        ("recipe/test_reward.py::test_killed_program_leaves_no_workers",),
    ),
    Fault(
        PROCESSES,
        "killed",
        "evaluation",
        "the same command goes on with the problems that are left; the results are those of an uninterrupted evaluation",
        ("recipe/test_evaluate.py::test_killed_and_resumed_equals_uninterrupted",),
    ),
    Fault(
        PROCESSES,
        "an engine fails",
        "evaluation on several GPUs",
        "the others are stopped, the error is shown, what is finished stays",
        ("recipe/test_evaluate.py::test_an_engine_that_fails_stops_the_others",),
    ),
    Fault(
        PROCESSES,
        "killed",
        "vLLM's engine",
        "the watchdog ends the run with status 1, says who died and from where the same command goes on; no process is left",
        ("verl_ext/test_killed_run.py", "verl_ext/test_watchdog.py::TestDeaths"),
    ),
    Fault(
        PROCESSES,
        "killed",
        "an actor of a run, or the trainer's process",
        "the same",
        (
            "verl_ext/test_endings.py::test_a_run_of_which_one_is_killed_says_who_and_leaves_nobody",
            "verl_ext/test_watchdog.py::TestDeaths",
        ),
    ),
    Fault(
        PROCESSES,
        "killed",
        "one of Ray's own servers, raylet or GCS",
        "the driver ends the run with status 1 and says the same; no process is left",
        ("docs/endings.md", "verl_ext/test_endings.py::TestServers"),
    ),
    Fault(
        PROCESSES,
        "SIGKILL, SIGTERM, Ctrl-C",
        "driver",
        "every process of the run is ended, those too that Ray does not know",
        (
            "verl_ext/test_endings.py::test_a_run_of_which_one_is_killed_says_who_and_leaves_nobody",
            "verl_ext/test_endings.py::TestReaper",
        ),
    ),
    Fault(
        PROCESSES,
        "ends, whatever by",
        "launch script",
        "the run ends with it",
        (
            "verl_ext/test_endings.py::TestReaper::test_ends_the_driver_with_its_owner",
            "recipe/test_train_cpu.py::test_the_run_ends_with_the_script",
        ),
    ),
    Fault(
        PROCESSES,
        "killed together with what ends its processes",
        "driver",
        "the next start names what is left, with age and command, and touches nothing; live runs are never named",
        ("verl_ext/test_endings.py::TestLeftovers",),
    ),
    Fault(
        PROCESSES,
        "no end",
        "a phase of a step, validation, checkpoint, start, end of the run",
        "the watchdog ends the run after `algorithm.watchdog.phase_timeout` or `long_phase_timeout`, and says where it waits",
        ("verl_ext/test_watchdog.py::TestTime",),
    ),
    Fault(
        PROCESSES,
        "the machine is suspended",
        "anywhere",
        "the time does not count",
        ("verl_ext/test_watchdog.py::TestTime::test_a_machine_that_was_suspended_is_not_blamed",),
    ),
    # ------------------------------------------------------------------------------------------------------ checkpoints
    Fault(
        CHECKPOINTS,
        "killed",
        "in a step",
        "the same command goes on from the last checkpoint; metrics, dumps and weights are an uninterrupted run's, bit for "
        "bit where requests have seeds ([resume](resume.md#how-exact))",
        ("verl_ext/test_resume_run.py", "verl_ext/test_continued_run.py"),
    ),
    Fault(
        CHECKPOINTS,
        "killed",
        "while a checkpoint is written, or before its step is logged",
        "goes on from the checkpoint before, so that no step's metrics are lost",
        (
            "verl_ext/test_checkpoints.py::TestStart::test_killed_while_one_was_saved_or_before_its_step_was_logged",
            "verl_ext/test_checkpoints.py::TestStart::test_killed_while_the_first_was_saved",
            "verl_ext/test_checkpoints.py::TestStart::test_killed_while_the_tracker_was_written",
            "verl_ext/test_continued_run.py::test_a_checkpoint_counts_once_its_step_is_logged",
        ),
    ),
    Fault(
        CHECKPOINTS,
        "files are missing or cut off",
        "a checkpoint",
        "named; the last whole one before it is taken; without one, refused before Ray with the way out",
        (
            "verl_ext/test_checkpoints.py::TestDamage",
            "verl_ext/test_run_identity.py::TestWhole",
        ),
    ),
    Fault(
        CHECKPOINTS,
        "killed, again and again",
        "logs: `metrics.jsonl`, TensorBoard",
        "no step twice and none lost; a half-written line is dropped",
        ("verl_ext/test_continued_logs.py::test_no_step_twice_and_none_lost",),
    ),
    Fault(
        CHECKPOINTS,
        "the model or the problems were made anew",
        "CPU example that goes on",
        "refused; `FRESH=1` begins a new run and moves the old one away",
        ("recipe/test_train_cpu.py::test_another_model_is_refused",),
    ),
    Fault(
        CHECKPOINTS,
        "a dump of another run",
        "the token dump's folder",
        "refused before Ray with each option that differs",
        ("verl_ext/test_run_identity.py::TestDump",),
    ),
    Fault(
        CHECKPOINTS,
        "killed five times in 300 steps",
        "driver, actor worker, rollout server, a worker that writes a checkpoint, reward worker",
        "the same command goes on each time; every step once; steps that were taken again are the same bit for bit",
        ("docs/soak/README.md",),
    ),
    Fault(
        CHECKPOINTS,
        "settings of another run",
        "start in a folder with checkpoints",
        "refused before Ray with each option, its value there and here, and the way out",
        ("verl_ext/test_run_identity.py::test_another_run_is_refused_with_what_differs",),
    ),
    Fault(
        CHECKPOINTS,
        "the run is finished",
        "start again",
        "says so, status 0, nothing is trained",
        (
            "verl_ext/test_run_identity.py::TestFinished::test_says_so_and_ends_with_status_0",
            "verl_ext/test_run_identity.py::test_commands_stop_before_ray",
        ),
    ),
    Fault(
        CHECKPOINTS,
        "checkpoints without a definition",
        "start",
        "refused before Ray; naming the checkpoint with `trainer.resume_mode=resume_path` takes it",
        ("verl_ext/test_run_identity.py::test_checkpoints_of_nobody_knows_whom",),
    ),
    # ------------------------------------------------------------------------------------------------------------ files
    Fault(
        FILES,
        "the disk fails or is full",
        "token dump",
        "the training goes on; said once and counted in `token_dump/failed_files`",
        (
            "verl_ext/test_dump_writer.py::TestWriter::test_a_failing_disk_is_counted_and_said_once",
            "verl_ext/test_step_dump.py::TestTrainer::test_a_disk_that_fails_is_a_metric",
        ),
    ),
    Fault(
        FILES,
        "the disk hangs",
        "token dump",
        "the training goes on; steps that find four others waiting are left out and counted",
        ("verl_ext/test_dump_writer.py::TestWriter::test_a_disk_that_hangs_does_not_stop_the_training",),
    ),
    Fault(
        FILES,
        "the folder cannot be made",
        "token dump",
        "refused at the start, naming `algorithm.token_dump.folder`",
        ("verl_ext/test_step_dump.py::TestTrainer::test_a_folder_that_cannot_be_made_is_refused_at_the_start",),
    ),
    Fault(
        FILES,
        "killed while a file is written",
        "token dump",
        "the file that was there stays; a new one appears whole or not at all",
        ("core/test_token_dump.py::TestFiles::test_what_fails_leaves_the_file_that_was_there",),
    ),
    Fault(
        FILES,
        "a file is cut off or broken",
        "reader of dumps, report",
        "the file is named, everything else is shown",
        (
            "core/test_token_dump.py::TestBroken",
            "report/test_page.py::TestBroken",
            "report/test_browser.py::TestRuns::test_of_a_broken_dump_says_so_at_the_top",
        ),
    ),
    Fault(
        FILES,
        "a line is cut off by a kill",
        "results of an evaluation",
        "the half line is dropped, its problem is sampled again; any other damage is refused",
        (
            "recipe/test_evaluate.py::test_broken_last_line_is_dropped",
            "recipe/test_evaluate.py::test_damaged_file_is_refused",
        ),
    ),
    # ------------------------------------------------------------------------------------------------------------ nodes
    Fault(
        NODES,
        "all scored rows on one rank, or none at all",
        "the backward on the forward of the old log-probabilities",
        "scores are those of the plain model; no rank waits for another",
        ("verl_ext/test_shared_forward.py::test_ranks_with_different_numbers_of_targets",),
    ),
    Fault(
        NODES,
        "very different rows on each rank",
        "passes through the model",
        "every rank runs as many micro-batches as the fullest; none waits",
        ("verl_ext/test_saliency_pass.py::test_ranks_with_very_different_rows_run_as_many_micro_batches",),
    ),
    Fault(
        NODES,
        "rows, targets and parameters that do not divide among the ranks",
        "three ranks",
        "scores and the next optimiser step are those of the plain model",
        ("verl_ext/test_three_ranks.py",),
    ),
    Fault(
        NODES,
        "a node loses its power",
        "two nodes, in a step",
        "the watchdog names what died and its address, status 1; the same command goes on with the nodes that are left",
        ("docs/multi_node.md",),
    ),
    Fault(
        NODES,
        "a node is cut off",
        "two nodes, in a step",
        "the same, once Ray has given the node up: 70 s with Ray's defaults",
        ("docs/multi_node.md",),
    ),
    Fault(
        NODES,
        "a node is cut off",
        "a collective of the ranks",
        "an error on both sides after `actor_rollout_ref.nccl_timeout` seconds, which verl alone leaves out",
        (
            "verl_ext/test_nodes.py::test_a_collective_ends_with_an_error_when_a_node_is_cut_off",
            "verl_ext/test_process_group.py::test_the_process_group_keeps_nccl_timeout",
        ),
    ),
    Fault(
        NODES,
        "none: two or four nodes instead of one",
        "pass and optimiser step of two ranks; whole runs of two and four",
        "the same scores, weights, advantages and parameters, bit for bit; all metrics of the runs too",
        ("verl_ext/test_nodes.py::test_two_nodes_give_what_one_gives", "docs/multi_node.md"),
    ),
    Fault(
        NODES,
        "another number of ranks",
        "a checkpoint that a run goes on from",
        "FSDP2's parameters, moments and adapters are shared out anew; others are refused before Ray with the two ways out",
        (
            "verl_ext/test_other_ranks.py::test_every_rank_holds_its_part",
            "verl_ext/test_other_ranks.py::test_what_cannot_be_shared_out_is_refused",
        ),
    ),
    Fault(
        NODES,
        "a node that does not join",
        "Slurm",
        "given up after `WAIT_SECONDS`, with the nodes that are there",
        ("recipe/test_multi_node.py::test_node_that_does_not_join",),
    ),
    Fault(
        NODES,
        "Ray's token is on one node and not on the others",
        "Slurm",
        "the script makes one for the job",
        ("recipe/test_multi_node.py::test_one_token_for_the_head_the_nodes_and_the_run",),
    ),
    Fault(
        NODES,
        "the script is ended or killed",
        "nodes on one machine (`scripts/local_nodes.sh`)",
        "nothing of them is left",
        ("recipe/test_local_nodes.py::test_nothing_is_left",),
    ),
    # ---------------------------------------------------------------------------------------------------------- numbers
    Fault(
        NUMBERS,
        "NaN or Inf in a reward",
        "advantages",
        "the row trains nothing, the others of its prompt are compared without it; said each time and counted in "
        "`unjudged_rate`. verl alone would skip the whole update",
        ("verl_ext/test_one_step.py::TestRewardsThatAreNotFinite",),
    ),
    Fault(
        NUMBERS,
        "NaN or Inf in an advantage",
        "weights of any method",
        "the row is treated as one with advantage 0; no other row changes",
        ("core/test_numbers.py::test_an_advantage_that_is_not_finite_counts_as_none",),
    ),
    Fault(
        NUMBERS,
        "NaN logits in one row",
        "any method, with any model",
        WEIGHS_ONE,
        ("core/test_numbers.py::test_nan_logits_in_one_row",),
    ),
    Fault(
        NUMBERS,
        "every advantage is 0, or all but one",
        "weights and figures of any method",
        "weights of 1 for what has no advantage, finite figures",
        (
            "core/test_numbers.py::test_a_batch_in_which_no_row_has_an_advantage",
            "core/test_numbers.py::test_a_batch_in_which_one_row_has_an_advantage",
        ),
    ),
    Fault(
        NUMBERS,
        "empty responses, or a batch without a token",
        "weights and figures of any method",
        "weigh 0 and count nowhere",
        (
            "core/test_numbers.py::test_empty_responses_among_others",
            "core/test_numbers.py::test_batches_without_a_token",
        ),
    ),
    Fault(
        NUMBERS,
        "scores that underflow, overflow or are all equal; bfloat16",
        "weights of any method",
        "finite weights of at least 0; 1 where the scores say nothing",
        (
            "core/test_numbers.py::test_numbers_that_under_and_overflow",
            "core/test_numbers.py::test_gradients_and_probabilities_that_underflow_in_bfloat16",
        ),
    ),
    Fault(
        NUMBERS,
        "rows of 32,768 tokens",
        "weights of any method",
        "those of the plain computation",
        ("core/test_numbers.py::test_rows_of_32768_tokens",),
    ),
    Fault(
        NUMBERS,
        "a vocabulary larger than the tokenizer's",
        "any method",
        "its surplus ids are tokens without text",
        ("core/test_numbers.py::test_a_vocabulary_that_is_padded_beyond_the_tokenizers",),
    ),
    Fault(
        NUMBERS,
        "NaN or Inf in scores",
        "weights of any method",
        WEIGHS_ONE,
        (
            "core/test_numbers.py::test_a_row_with_a_number_that_is_not_finite_weighs_one_and_no_other_notices",
            "core/test_weighting.py::test_a_non_finite_score_makes_its_row_weigh_one",
            "core/test_token_weights.py::test_a_row_with_non_finite_scores_weighs_one_and_is_counted",
        ),
    ),
    Fault(
        NUMBERS,
        "NaN logits in one row",
        "saliency pass, alone or on the forward of the old log-probabilities",
        WEIGHS_ONE,
        ("verl_ext/test_pass_memory.py::test_rows_with_nan_logits_leave_the_others_alone",),
    ),
    Fault(
        NUMBERS,
        "NaN or Inf in entropies or old log-probabilities",
        "`entropy`, `entropy_bonus`, `high_entropy`, `probability`, `surprisal`, `stare`",
        WEIGHS_ONE,
        (
            "core/test_entropy.py::test_non_finite_entropies_leave_the_row_at_one",
            "core/test_entropy_bonus.py::test_non_finite_entropies_leave_the_row_at_one",
            "core/test_high_entropy.py::test_a_row_with_a_non_finite_entropy_weighs_one_and_counts_nowhere",
            "core/test_probability.py::test_non_finite_log_probabilities_leave_the_row_at_one",
            "core/test_surprisal.py::test_non_finite_log_probabilities_only_matter_where_they_are_read",
            "core/test_stare.py::test_a_row_with_a_non_finite_value_weighs_one_and_counts_nowhere",
        ),
    ),
    Fault(
        NUMBERS,
        "no row trains",
        "choice of rows",
        "nothing is selected, no pass runs",
        ("core/test_weighting.py::test_row_selection_of_an_empty_batch",),
    ),
    Fault(
        NUMBERS,
        "an answer of 10,000 tokens",
        "logits of the targets",
        "taken 512 targets at a time; no tensor grows with targets and vocabulary",
        (
            "core/test_activations.py::test_no_tensor_grows_with_target_and_vocabulary",
            "verl_ext/test_pass_memory.py::TestLongTargets",
        ),
    ),
    # ------------------------------------------------------------------------------------------------------------- text
    Fault(
        TEXT,
        "an answer that makes the judge hang, crash or take all memory",
        "reward",
        "score 0 within the time limit; the next answers are judged as ever",
        ("recipe/test_reward.py::test_hostile_answers_score_zero_and_leave_a_working_pool",),
    ),
    Fault(
        TEXT,
        "an answer that is a program",
        "reward",
        "it can neither read files but Python's libraries, nor write, connect, start or signal anything "
        "([hostile input](hostile_input.md))",
        ("core/test_confine.py", "recipe/test_reward.py::test_what_a_verification_must_not_do"),
    ),
    Fault(
        TEXT,
        "a small file that unpacks to gigabytes",
        "reader of dumps, report",
        "read up to a limit, in little memory; said with the file",
        (
            "core/test_tampered.py::test_a_row_group_that_says_it_is_too_large",
            "core/test_tampered.py::test_a_long_text_that_every_row_and_token_repeats",
        ),
    ),
    Fault(
        TEXT,
        "a bit flipped, an end missing, a format from elsewhere",
        "reader of dumps, `metrics.jsonl`",
        "a file that is wrong is named, its rows are whole or left out",
        (
            "core/test_tampered.py::test_damage_anywhere",
            "core/test_token_dump.py::TestBroken",
            "core/test_tampered.py::test_metrics_that_are_none",
        ),
    ),
    Fault(
        TEXT,
        "paths and commands as names; links, pipes and devices as files",
        "dump, report, figures",
        "names stay texts; nothing is written through a link, nothing is read without an end",
        ("core/test_tampered.py::test_names_from_a_model_are_no_paths", "core/test_tampered.py::TestLinks"),
    ),
    Fault(
        TEXT,
        "a definition or a number of ranks that was changed",
        "checkpoints",
        "refused before anything is loaded, naming the file; the weights themselves are trusted",
        (
            "verl_ext/test_run_identity.py::test_a_broken_definition_is_named",
            "core/test_tampered.py::test_a_checkpoint_to_evaluate_that_does_not_say_its_ranks",
        ),
    ),
    Fault(
        TEXT,
        "any bytes",
        "answer spans, judge, dump, report, data preparation, terminal",
        "no promise of the documentation is broken; found by coverage-guided fuzzing, replayed by the tests",
        ("fuzz/test_corpus.py", "docs/hostile_input.md"),
    ),
    Fault(
        TEXT,
        "control characters, markup, half surrogates, bytes that are no UTF-8",
        "answer spans, dump, page, terminal, notebook, figures",
        "shown as text, escaped; what is read back is what was written",
        (
            "core/test_answer_span.py::test_tokens_of_hostile_text",
            "core/test_token_dump.py::TestRoundTrip::test_hostile_texts",
            "report/test_terminal.py::TestView::test_hostile_texts_do_nothing",
            "report/test_notebook.py::test_hostile_texts_are_text",
            "report/test_figures.py::test_hostile_names",
        ),
    ),
    Fault(
        TEXT,
        "a tokenizer that loses text",
        "start of a run",
        "refused, with an example of what is lost and the remedy",
        (
            "core/test_tokenizers.py::test_a_damaged_tokenizer_is_refused",
            "verl_ext/test_checks.py::test_a_tokenizer_that_loses_text_is_refused_for_every_estimator",
        ),
    ),
    Fault(
        TEXT,
        "rows that cannot be used",
        "data preparation",
        "left out and counted; too many of them are refused; other data sets are still prepared",
        (
            "recipe/test_data.py::test_too_many_bad_rows_are_refused",
            "recipe/test_data.py::test_a_failing_dataset_does_not_stop_the_others",
        ),
    ),
    # --------------------------------------------------------------------------------------------------------- settings
    Fault(
        SETTINGS,
        "a combination that cannot work",
        "start of a run",
        "refused before Ray with the option and the remedy ([compatibility](compatibility.md))",
        (
            "verl_ext/test_checks.py::TestCommandLine::test_a_run_refuses_before_ray_starts",
            "verl_ext/test_checks.py::test_refused_with_option_and_remedy_before_the_trainer_is_chosen",
        ),
    ),
    Fault(
        SETTINGS,
        "a bad value of a knob",
        "launch scripts",
        "one line that names the knob, before anything is installed or started",
        ("recipe/test_launch_scripts.py::test_bad_knobs_of_the_cpu_example",),
    ),
    Fault(
        SETTINGS,
        "another version of verl",
        "start of a run",
        "refused with the version that is needed",
        ("verl_ext/test_checks.py::TestVerlVersion::test_refuses_others",),
    ),
)
