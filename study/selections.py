"""What the hard selections pick, at warmed-up models that are made again; ``python -m study selections``.

A hard selection keeps one token of a wrong response. Each of its picks is looked up in the ground truth: is it a token of the
first error, and if not, what is it? Rows of groups with one outcome have no advantage and no pick. Beside it stand the share
of such groups, and how much of the entropy lies where nothing is decided.

The rollout batches are the first ones of the alignment measurement.

Shape suffixes: L prompt + response, T response tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from study.arms import ARMS
from study.credit import State, credit, policy_state
from study.plan import NO_ARM, Job, StudyPlan
from study.rollouts import CONTROL, Rollouts, numbers, roll_out, sample_accuracy
from study.task import ASIDE, ASIDE_RESULT, FILL, RESULT, StudyProblem, TokenReading, study_tokenizer
from study.trainer import RunSettings
from study.work import PACKAGES, Sitting, do, load_model, problems_of

SELECTIONS = ("surprisal", "random_token", "last_result")
KINDS = ("error", "filler", "aside", "result", "other")
"""What a pick is; ``error`` comes before the kind of token."""
BATCHES = 10
Figures = dict[tuple[str, str], float]
"""By arm (``-`` for what belongs to none) and figure."""


def kind_of(read: TokenReading, place: int) -> str:
    """What the token at that place of a response is, one of :data:`KINDS`."""
    if read.error_T[place]:
        return "error"
    return {FILL: "filler", ASIDE: "aside", ASIDE_RESULT: "aside", RESULT: "result"}.get(read.role_T[place], "other")


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[StudyProblem],
    settings: RunSettings,
    *,
    batches: int,
    seed: int,
) -> Figures:
    """Counts of picks by kind, median surprisals in nats, groups, and shares of tokens and of entropy.

    Args:
        model: a warmed-up model.
        tokenizer: its tokenizer.
        problems: training problems.
        settings: of the runs.
        batches: rollout batches.
        seed: of all random numbers.

    Raises:
        ValueError: every group has one outcome only.
    """
    model.eval()
    order = random.Random(f"alignment {seed}")
    picks: dict[str, list[tuple[str, float]]] = {arm: [] for arm in SELECTIONS}
    errors: list[float] = []
    groups: list[bool] = []
    entropy: list[tuple[float, float, int, int]] = []
    for batch in range(1, batches + 1):
        rollouts = roll_out(model, tokenizer, order.sample(problems, settings.prompts), settings.rollouts, seed, batch)
        state = policy_state(model, rollouts)
        drawn_BL = numbers(seed, CONTROL, batch, tuple(rollouts.input_ids_BL.shape))
        for arm in SELECTIONS:
            advantages_BL = credit(model, tokenizer, rollouts, ARMS[arm], state, drawn_BL, batch)
            picks[arm] += picked(rollouts, advantages_BL, state)
        rewards = rollouts.rewards_B.reshape(-1, settings.rollouts)
        groups += (rewards == rewards[:, :1]).all(dim=1).tolist()
        mixed_B = (rewards != rewards[:, :1]).any(dim=1).repeat_interleave(settings.rollouts)
        for row, read in enumerate(rollouts.reads):
            start = len(rollouts.prompts[row])
            entropy_T = state.entropy_BL[row, start : start + len(read.role_T)].double().numpy()
            idle_T = np.isin(read.role_T, (FILL, ASIDE, ASIDE_RESULT)) & ~read.decisive_T
            entropy.append((entropy_T[idle_T].sum(), entropy_T.sum(), int(idle_T.sum()), len(idle_T)))
            if mixed_B[row] and not rollouts.rewards_B[row] and read.error_T.any():
                surprisal_T = -state.old_log_probs_BL[row, start : start + len(read.role_T)].numpy()
                errors.append(float(surprisal_T[read.error_T].max()))
    if all(groups):
        raise ValueError(f"no group has both outcomes in {batches} batches: nothing is picked; take more batches")
    idle, all_of_it, idle_tokens, tokens = np.sum(entropy, axis=0)
    figures: Figures = {
        (NO_ARM, "groups"): len(groups),
        (NO_ARM, "groups of one outcome"): sum(groups),
        (NO_ARM, "median surprisal of the error"): float(np.median(errors)),
        (NO_ARM, "share of tokens in filler and asides"): idle_tokens / tokens,
        (NO_ARM, "share of entropy in filler and asides"): idle / all_of_it,
    }
    for arm, found in picks.items():
        figures[arm, "rows"] = len(found)
        figures |= {(arm, kind): sum(kind == own for own, _ in found) for kind in KINDS}
        figures[arm, "median surprisal"] = float(np.median([surprisal for _, surprisal in found]))
    return figures


def picked(rollouts: Rollouts, advantages_BL: torch.Tensor, state: State) -> list[tuple[str, float]]:
    """Kind and surprisal of the token that each wrong row keeps; rows that keep none or several are left out."""
    found = []
    for row, read in enumerate(rollouts.reads):
        start = len(rollouts.prompts[row])
        places = (advantages_BL[row] < 0).nonzero().flatten().tolist()
        if len(places) == 1:
            surprisal = -float(state.old_log_probs_BL[row, places[0]])
            found.append((kind_of(read, places[0] - start), surprisal))
    return found


def write(plan: StudyPlan, sitting: Sitting, seeds: Sequence[int]) -> None:
    """Measure at the models of these seeds, made again where they are gone, and add what is not in the file yet.

    The model's accuracy stands beside the figures: on another machine it may be another model than the recorded one.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    file, name = sitting.files.selections, plan.regimes[0].name
    for seed in seeds:
        if any((row["regime"], row["seed"]) == (name, str(seed)) for row in file.read()):
            continue
        job = Job("start", name, NO_ARM, seed)
        if not sitting.folder(job).is_dir():
            do(plan, job, sitting.folder(job))
        training, held_out = problems_of(name, plan.train_size, plan.held_out_size, seed)
        model, tokenizer, run = load_model(sitting.folder(job)), study_tokenizer(), plan.run
        sampled = sample_accuracy(model, tokenizer, held_out, run.samples, run.temperature, seed, 0)
        figures = {(NO_ARM, "accuracy"): sampled.accuracy}
        figures |= measure(model, tokenizer, training, run, batches=BATCHES, seed=seed)
        common = {
            "regime": name,
            "seed": seed,
            "date": date.today().isoformat(),
            "versions": " ".join(f"{package} {version(package)}" for package in PACKAGES),
        }
        file.append(
            [{**common, "arm": arm, "figure": figure, "value": value} for (arm, figure), value in figures.items()]
        )
        print(f"seed {seed}: accuracy {sampled.accuracy}", flush=True)
