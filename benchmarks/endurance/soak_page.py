"""The soak's tables and picture, from the records beside them in ``docs/soak``."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.endurance.soak import ROLES, ROOT, last_words
from recipe.marked_text import write_marked

PAGE = ROOT / "docs" / "soak"
WARM_UP = 10
"""First steps of a life, in which the processes fill their caches; the memory's slope begins behind them."""
ENDING = 15.0
"""Seconds before the end of a life that do not count for the slope."""
LIVES = """\
| life | from step | to step | killed | ended by | status | s to the end | s to the next step | lost | left behind |
|---|---|---|---|---|---|---|---|---|---|"""
LIFE = "| {number} | {resumed_from} | {last_step} | {killed} | {ended_by} | {status} | {to_end:.0f} | {to_step:.0f} "
LIFE += "| {lost:.0f} s, {again:.0f} steps taken again | {left} |"
TWICE = "| steps | values | differing |\n|---|---|---|"
MEMORY = """\
| processes | MiB, median | MiB a hundred steps | standard error | steps {middle:.0f} to {last} alone |
|---|---|---|---|---|"""
SLOPE = "| {role} | {level:.0f} | {slope:+.1f} | {error:.1f} | {late:+.1f} |"
LATER = "| processes | this soak | with bounds | standard error |\n|---|---|---|---|"
LATER_SLOPE = "| {role} | {slope:+.1f} | {after:+.1f} | {after_error:.1f} |"
FIGURES = {
    "reward": "critic/score/mean",
    "accuracy": r"val-core/.+/acc/mean@\d+",
    "entropy": "actor/entropy",
    "seconds": "timing_s/step",
    "save_seconds": "timing_s/save_checkpoint",
}
"""Columns of ``steps.csv`` by the patterns of their metrics' names."""


def collect(soak: Path) -> None:
    """Put the records of a finished soak where the page is made from; of one without kills the memory, beside the other's."""
    plan = json.loads((soak / "plan.json").read_text())
    run_dir, prefix = soak / "seed0" / "grail", "" if plan["kills"] else "later_"
    shutil.copy(soak / "memory.csv", PAGE / f"{prefix}memory.csv")
    lives = pd.read_csv(soak / "lives.csv")
    lives["message"] = [last_words(run_dir.parent / f"life-{number}.log", run_dir) for number in lives.number]
    lives.to_csv(PAGE / f"{prefix}lives.csv", index=False)
    if prefix:
        return
    records = pd.read_json(run_dir / "metrics.jsonl", lines=True)
    metrics = pd.DataFrame(records.data.tolist())
    steps = records[["step"]].assign(**{n: metrics.filter(regex=f"^{p}$").mean(axis=1) for n, p in FIGURES.items()})
    steps.round(2).to_csv(PAGE / "steps.csv", index=False)
    pd.DataFrame(twice(run_dir / "tensorboard")).to_csv(PAGE / "twice.csv", index=False)
    dumped = sorted(int(path.name[5:11]) for path in (run_dir / "tokens").glob("step_*.parquet"))
    plan["dumped_steps"] = [dumped[0], dumped[-1], len(dumped)]
    (PAGE / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")


def twice(folder: Path) -> list[dict[str, Any]]:
    """Steps that two lives took, compared by what both logged of them: one row for each pair of lives.

    TensorBoard's files keep them, though no reader shows them twice. Times and memory are left out: they are each life's own.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    lives, rows = [], []
    for path in sorted(folder.glob("events.*")):
        logged = {
            (event.step, value.tag): float(tensor_util.make_ndarray(value.tensor))
            for event in EventFileLoader(str(path)).Load()
            for value in event.summary.value
            if not re.search(r"timing|perf/", value.tag)
        }
        lives += [logged] if logged else []
    for earlier, later in itertools.pairwise(lives):
        if both := sorted(earlier.keys() & later.keys()):
            differing = [key for key in both if earlier[key] != later[key]]
            row = {"first": both[0][0], "last": both[-1][0], "values": len(both), "differing": len(differing)}
            rows.append(row | {"names": " ".join(sorted({name for _, name in differing}))})
    return rows


def slopes(memory: pd.DataFrame, lives: pd.DataFrame) -> pd.DataFrame:
    """Of every role the median in MiB, and the slope in MiB a hundred steps with its standard error: a common slope with a
    level for each life, by least squares, behind ``WARM_UP`` steps."""
    lives = lives.set_index("number")
    # A run that has ended still makes its report.
    drivers = memory[memory.role == "driver"].groupby("life").seconds.max()
    ends = lives.killed_at.fillna(lives.ended).combine(drivers.reindex(lives.index), np.fmin) - ENDING
    memory = memory[(memory.seconds > memory.life.map(lives.first_step_at)) & (memory.seconds < memory.life.map(ends))]
    total = memory.groupby(["life", "step", "seconds"], as_index=False, sort=False).mebibytes.sum().assign(role="all")
    memory = pd.concat([memory, total])
    memory = memory[memory.step > memory.life.map(lives.resumed_from) + WARM_UP]
    rows = []
    for role in (*ROLES, "all"):
        of_role = memory[memory.role == role]
        groups = of_role.groupby("life")
        kept = groups.step.transform("size") >= 3
        x, y = ((of_role[name] - groups[name].transform("mean"))[kept] for name in ("step", "mebibytes"))
        if len(x) >= 6 and (x**2).sum():
            slope = (x * y).sum() / (x**2).sum()
            freedom = max(1, len(x) - groups.ngroups - 1)
            error = np.sqrt(((y - slope * x) ** 2).sum() / freedom / (x**2).sum())
            rows.append([role, of_role.mebibytes.median(), 100 * slope, 100 * error])
    return pd.DataFrame(rows, columns=["role", "level", "slope", "error"]).set_index("role")


def problems(numbers: list[int], total: int) -> str:
    """Faults of the history, where not every step stands there once and in order."""
    counts = pd.Series(numbers).value_counts().reindex(range(total + 1), fill_value=0)
    if numbers == list(counts.index):
        return "every step once and in order."
    faults = {"twice": counts.index[counts > 1].tolist(), "missing": counts.index[counts == 0].tolist()}
    return f"steps {faults}, in order: {numbers == sorted(numbers)}"


def with_losses(lives: pd.DataFrame, seconds: float) -> pd.DataFrame:
    """The lives, with the seconds to the end, to the next step, and lost: both and the steps that were taken again."""
    lives = lives.assign(to_end=lives.ended - lives.killed_at)
    lives["to_step"] = (lives.first_step_at - lives.started).shift(-1).where(lives.killed_at.notna())
    lives["again"] = lives.last_step - lives.resumed_from.shift(-1)
    lives["lost"] = lives.to_end + lives.to_step + (lives.again - 1).clip(lower=0) * seconds
    return lives


def draw(steps: pd.DataFrame, memory: pd.DataFrame, lives: pd.DataFrame) -> None:
    """The curve, steps over time and memory over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curve, progress, amount) = pyplot.subplots(3, 1, figsize=(9, 11), dpi=120, layout="constrained")
    kills = lives.assign(stop=lives.killed_at.fillna(lives.ended) / 60, begun=lives.first_step_at / 60)
    rewards, held_out = steps.dropna(subset="reward"), steps.dropna(subset="accuracy")
    curve.plot(rewards.step, rewards.reward, color="#c8d0d8", linewidth=0.8, label="training reward")
    curve.plot(rewards.step, rewards.reward.rolling(20).mean(), color="#3b6ea5", label="mean of 20 steps")
    curve.plot(held_out.step, held_out.accuracy, color="#0b6e4f", marker="o", label="held-out accuracy")
    order = [role for role in ROLES if (memory.role == role).any()]
    stack = memory.pivot_table(index="seconds", columns="role", values="mebibytes", aggfunc="sum")[order] / 1024
    stack = stack.reindex(stack.index.union(lives.ended)).fillna(0)  # nothing is left at a life's end
    amount.stackplot(stack.index / 60, stack.T, labels=order, step="post", alpha=0.85)
    for life in kills.itertuples():
        progress.plot([life.started / 60, life.begun], [life.resumed_from] * 2, color="#9aa5b1", linewidth=1)
        progress.plot([life.begun, life.stop], [life.resumed_from + 1, life.last_step], color="#3b6ea5")
        if life.killed_at > 0:
            red = "#b5432a"
            progress.plot(life.stop, life.last_step, marker="x", color=red)
            at = (life.stop, life.last_step)
            progress.annotate(f"{life.killed} ", at, fontsize=8, ha="right", va="bottom", color=red)
            curve.axvline(life.last_step, color=red, linewidth=0.8, linestyle=":")
            amount.axvline(life.stop, color=red, linewidth=0.8, linestyle=":")
    curve.set(
        xlabel="step", ylabel="share right", ylim=(0, 1), xlim=(0, None), title="The run's one curve; dotted: kills"
    )
    progress.set(xlabel="minutes", ylabel="step", title="Lives: grey starting, blue training, x killed")
    amount.set(xlabel="minutes", ylabel="GiB (PSS)", title="Memory of all processes of the run")
    curve.legend(loc="upper left", ncols=3)
    amount.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=5, fontsize=8)
    for axes in (curve, progress, amount):
        axes.grid(alpha=0.3)
    figure.savefig(PAGE / "soak.png")
    pyplot.close(figure)


def passages() -> dict[str, list[str]]:
    """The generated passages of the page by the names of their marks."""
    names = ("steps", "memory", "lives", "twice", "later_memory", "later_lives")
    steps, memory, lives, repeated, later_memory, later_lives = (pd.read_csv(PAGE / f"{name}.csv") for name in names)
    plan = json.loads((PAGE / "plan.json").read_text())
    seconds, saving = steps.seconds.median(), steps.save_seconds.median()
    lives = with_losses(lives, seconds)
    longest = lives.loc[[(lives.last_step - lives.resumed_from).idxmax()]]
    middle, last = (longest.last_step + longest.resumed_from).item() / 2, longest.last_step.item()
    fitted, later = slopes(memory, lives), slopes(later_memory, later_lives)
    half = memory[(memory.life == longest.number.item()) & (memory.step > middle)]
    fitted = fitted.assign(late=slopes(half, longest).slope, after=later.slope, after_error=later.error)
    whole = (
        f"{lives.ended.iloc[-1] / 60:.0f} minutes",
        f"{seconds:.1f} s a step and {saving:.2f} s a checkpoint (medians).",
    )
    history = problems(steps.step.tolist(), plan["steps"])
    cells = lives.assign(left=lives.left_behind.astype(object).fillna("nothing"))
    return {
        "history": [
            f"- {len(steps)} lines in `metrics.jsonl`, steps 0 to {plan['steps']}: {history}",
            "- {2} files in the token dump, steps {0} to {1}.".format(*plan["dumped_steps"]),
            f"- {len(lives)} lives, {lives.killed.count()} kills, {'; '.join(whole)}",
        ],
        "lives": [*LIVES.splitlines(), *_rows(LIFE, cells)],
        "twice": [*TWICE.splitlines(), *_rows("| {first} to {last} | {values} | {differing} {names} |", repeated)],
        "said": _rows(
            "- life {number}: `{message}`",
            lives.dropna(subset="message").assign(message=lives.message.dropna().map(_plain)),
        ),
        "memory": [*MEMORY.format(middle=middle, last=last).splitlines(), *_rows(SLOPE, fitted)],
        "later": [*LATER.splitlines(), *_rows(LATER_SLOPE, fitted)],
    }


def _rows(template: str, frame: pd.DataFrame) -> list[str]:
    """A line for each row of a table, and nothing for the parts of a cell that have no value."""
    lines = (template.format(**row) for row in frame.reset_index().to_dict("records"))
    return [re.sub(r"(?<=\| )nan[^|]*(?= \|)|(?<=\d) nan(?= \|)", "", line) for line in lines]


def _plain(message: str) -> str:
    """A line of a log without colours, the process that wrote it, and back quotes."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", message)
    return re.sub(r"^\([^)]*pid=\d+[^)]*\)\s*", "", text).replace("`", "'").strip()


def write() -> None:
    """The page's passages and its picture."""
    draw(*(pd.read_csv(PAGE / f"{name}.csv") for name in ("steps", "memory", "lives")))
    for name, lines in passages().items():
        write_marked(PAGE / "README.md", name, "\n".join(lines))
