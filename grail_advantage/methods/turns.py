"""Credit by turn: every turn gets an advantage of its own, of either sign. A *turn* is a maximal run of tokens that the
model wrote; what a tool or a user said is between two turns. A *session* is one conversation: one response, or several
whose turns follow each other; its outcome, the reward of its last response, counts once. docs/turns.md says which
methods are biased.

A method has one function, :meth:`TurnMethod.advantages`. Shape: K turns of one session."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grail_advantage.data import OLD_LOG_PROBS, Rollouts, runs, within_range
from grail_advantage.method import AdvantageMethod, build, option, register

GAMMA = "discount from one turn to the next in the return of a turn"
DEVIATION = "whether differences from a mean are divided by the deviation of what it was taken over, as in GRPO"
logger = logging.getLogger(__name__)
Rewards = Sequence[float | Sequence[float | None] | None]  # by turn; a list for several calls of a turn


@dataclass(frozen=True)
class Session:
    """The turns of one session, as a method sees them."""

    key: str  # the host's name for it, for messages
    group: Hashable  # the same for sessions of one prompt
    outcome: float
    rewards: np.ndarray  # float64 (K,); by turn, without the outcome
    before: Sequence[Hashable] = ()  # what was said before each turn, as token ids; of a method that reads "messages"
    turns: Sequence[tuple[int, int, int]] = ()  # response, first token and end of each; none in turn_advantages()
    log_probs: Sequence[np.ndarray] = ()  # float32, of each turn's tokens; of a method that reads "old_log_probs"
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # those read: one value for each response

    def returns(self, gamma: float, *, outcome: bool) -> np.ndarray:
        """float64 (K,): each turn's reward and the discounted ones after it; with the outcome, if it counts, in the
        last."""
        g = self.rewards.copy()
        g[-1] += self.outcome if outcome else 0.0
        for k in range(len(g) - 2, -1, -1):
            g[k] += gamma * g[k + 1]
        return g


def compare(
    values: Sequence[np.ndarray], keys: Sequence[Sequence[Any]], *, deviation: bool, epsilon: float = 1e-6
) -> list[np.ndarray]:
    """Values (K,) of each session's turns less the mean of those with the same key, 0 for a key of one turn; with
    ``deviation`` divided by the deviation, with n - 1, plus ``epsilon``, as verl's GRPO does it."""
    alike: dict[Any, list[float]] = defaultdict(list)
    for of, under in zip(values, keys, strict=True):
        for value, key in zip(of, under, strict=True):
            alike[key].append(value)
    mean = {key: np.mean(of) for key, of in alike.items()}
    spread = {key: np.std(of, ddof=1) + epsilon if deviation and len(of) > 1 else 1.0 for key, of in alike.items()}
    return [
        np.array([(value - mean[key]) / spread[key] for value, key in zip(of, under, strict=True)])
        for of, under in zip(values, keys, strict=True)
    ]


class UncertainError(ValueError):
    """A session that cannot be compared with others, and trains nothing."""


def rewards_by_turn(
    lists: Sequence[Any], turns: Sequence[int], align: str = "turns", *, differences: bool = False
) -> np.ndarray:
    """The rewards of a session's turns, float64 (K,). ``[[0.5, None, [1, 1]]]`` gives ``[0.5, 0, 2]``: of the three
    turns the second has no reward, the third made two calls. With ``differences`` ``[[0.2, None, 0.5]]`` gives ``[0.2,
    0, 0.3]``.

    Args:
        lists: one for each response, of its own turns; where the last alone has one that is not ``None``, of the
            session's.
        turns: of each response.
        align: what a list without lists in it holds, see :attr:`TurnMethod.align`.

    Raises:
        UncertainError: a number that is not finite, or one of no certain turn; ValueError: no such list, or a wrong
            length.
    """
    if all(one is None for one in lists[:-1]):
        lists, turns = lists[-1:], [sum(turns)]
    calls = [of for one, count in zip(lists, turns, strict=True) for of in _calls(one, count, align)]
    if not differences:
        return np.array([sum(of) for of in calls], dtype=np.float64)
    scores = [0.0]
    for of in calls:
        scores.append(of[-1] if of else scores[-1])
    return np.diff(scores)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _is_flat(given: Any) -> bool:
    return given is None or not any(isinstance(entry, list | tuple | np.ndarray) for entry in given)


def calls_of(given: Any) -> list[list[float]]:
    """The numbers of each entry of a list of rewards; the errors are those of :func:`rewards_by_turn`."""
    entries = [] if given is None else _plain(given)
    if not isinstance(entries, list | tuple):
        raise ValueError(f"has {given!r}; give it a list with a number, None or a list of numbers for each turn")
    calls = []
    for entry in map(_plain, entries):
        found = [one for one in (entry if isinstance(entry, list | tuple) else [entry]) if one is not None]
        if not all(isinstance(one, int | float | np.number) for one in found):
            raise ValueError(f"has the reward {entry!r}; give a number, None or a list of numbers for each turn")
        if not within_range(np.array(found, dtype=np.float64)).all():
            raise UncertainError(f"has the reward {entry!r}, which is not finite or too large")
        calls.append(list(map(float, found)))
    return calls


def rewards_label(given: Any) -> list[Any]:
    """A list of rewards for the dump's label: numbers, ``None``, and lists of a turn's calls; empty where it is
    none."""
    try:
        calls = calls_of(given)
    except ValueError:
        return []
    return [of[0] if of else None for of in calls] if _is_flat(given) else calls


def list_a_turn(given: Any, turns: int) -> Any:
    """A flat list of as many rewards as turns, as a list for each turn; else as it is. For a host in which no turn
    makes two calls, and the last turn's call may have no answer."""
    flat = isinstance(_plain(given), list | tuple) and _is_flat(given)
    return [[one] for one in _plain(given)] if flat and len(given) == turns else given


def _calls(given: Any, turns: int, align: str) -> list[list[float]]:
    """The numbers of each turn of one list."""
    calls, flat = calls_of(given), _is_flat(given)
    what = f"has {turns} turns and the {len(calls)} rewards {given!r}"
    if align == "calls" and flat and turns == 1:
        calls = [[one for of in calls for one in of]]  # there is no other turn
    elif align == "calls" and flat and len(calls) >= turns:
        remedy = "give a list for each turn, such as [[1, 0.5], [0]], or with align=turns one number for each"
        raise UncertainError(f"{what}, so that it is not certain which turn each belongs to; {remedy}")
    fits = (turns,) if align == "turns" and flat else (turns - 1, turns)
    if len(calls) not in fits:
        wants = "with turns one a turn, with calls one for each turn that a tool answered"
        raise ValueError(f"{what}, where align={align} wants {' or '.join(map(str, fits))}: {wants}")
    return calls + [[]] * (turns - len(calls))


class TurnMethod(AdvantageMethod):
    """Base of the methods by turn. A session with a number that is not finite, or one of no certain turn, is compared
    with no other and trains nothing."""

    reads = frozenset({"groups", "tokens", "rewards", "sessions"})
    non_finite_trains = False

    rewards: str = option(
        "tool_rewards",
        "field with each response's list of rewards by turn: from the reward function, the agent loop or the data; "
        "empty: only the outcome counts",
    )
    align: Literal["calls", "turns"] = option(
        "calls",
        "how many rewards a response with K turns brings. turns: K. calls: one for each tool call, K - 1 if each turn "
        "but the last makes one; K or more are ambiguous, and the response trains nothing, but for K = 1, a list for each "
        "turn's calls, and K rewards in verl's own agent loop with max_parallel_calls=1",
    )
    differences: bool = option(False, "whether the list holds scores of states, whose differences are the rewards")
    mask_truncated: bool = option(False, "as elsewhere; it biases the gradient where the policy decides when to stop")
    outcome: bool = option(True, "whether the response's own reward counts, with its last turn")

    @property
    def field_names(self) -> list[str]:
        return [*super().field_names, *([self.rewards] if self.rewards else [])]

    def advantages(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        """Of the turns of one prompt's sessions, float (K,) each."""
        raise NotImplementedError(f"{type(self).__name__} has no advantages()")

    def by_groups(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        """:meth:`advantages` of the sessions of each group, in the order of the sessions."""
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for place, session in enumerate(sessions):
            groups[session.group].append(place)
        found: dict[int, np.ndarray] = {}
        for places in groups.values():
            found |= zip(places, self.advantages([sessions[place] for place in places]), strict=True)
        return [found[place] for place in range(len(sessions))]

    def sessions(self, given: Iterable[tuple], where: str) -> tuple[dict[int, Session], dict[int, str]]:
        """Sessions of (key, group, outcome, lists, turns of each response, align), and why others have none, by
        place."""
        found, out = {}, {}
        for place, (key, group, outcome, lists, counts, align) in enumerate(given):
            try:
                if not within_range(np.array(outcome, dtype=np.float64)):
                    raise UncertainError(f"has the outcome {outcome}, which is not finite or too large")
                rewards = rewards_by_turn(lists, counts, align, differences=self.differences)
                found[place] = Session(key, group, outcome, rewards)
            except UncertainError as reason:
                out[place] = f"{key} {reason}"
            except ValueError as error:
                raise ValueError(f"{where} {key} {error}") from None
        return found, out

    def select(self, r: Rollouts) -> Tensor:
        """All responses that train, but those whose advantages are all 0."""
        if OLD_LOG_PROBS in self.reads:  # they come after the selection
            return r.trains
        scores, _ = self._scores(r)
        return r.trains & ((r.advantages != 0) | (scores != 0).any(dim=1))

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        """The token advantages; NaN in a session that trains nothing."""
        scores, out = self._scores(r)
        for reason in list(out.values())[:1]:
            what = f"{self.section}.rewards={self.rewards}: response {reason}"
            logger.warning("%s: %d sessions train nothing. %s", self.name, len(out), what)
        return scores

    def _scores(self, r: Rollouts) -> tuple[Tensor, dict[int, str]]:
        written, columns = (r.tokens >= 0).numpy(), r.columns.get(OLD_LOG_PROBS)
        of = [[[(i, *edges) for edges in runs(written[i])] for i in indices] for indices in r.conversations]
        there = [(indices, turns) for indices, turns in zip(r.conversations, of, strict=True) if any(turns)]
        given = []
        assert r.groups is not None and r.rewards is not None  # it reads them
        for indices, turns in there:
            last, counts, align = indices[-1], list(map(len, turns)), self.align
            lists = [r.fields[self.rewards][i] for i in indices] if self.rewards else []
            if not self.rewards:
                lists, counts, align = [[None] * sum(counts)], [sum(counts)], "turns"
            given.append((r.keys[last], int(r.groups[last]), float(r.rewards[last]), lists, counts, align))
        found, out = self.sessions(given, f"{self.section}.rewards={self.rewards}: response")
        scores, sessions = torch.zeros_like(r.mask, dtype=torch.float64), []
        for place in out:
            scores[there[place][0]] = torch.nan
        for place, session in found.items():
            indices, of_responses = there[place]
            flat = [turn for of_one in of_responses for turn in of_one]
            known = [] if columns is None else [columns[i, a:b].float().numpy() for i, a, b in flat]
            fields = {name: [r.fields[name][i] for i in indices] for name in self.field_names}
            before = _before(r, of_responses) if "messages" in self.reads else ()
            sessions.append(replace(session, before=before, turns=flat, log_probs=known, fields=fields))
        for session, of_turns in zip(sessions, self.by_groups(sessions), strict=True):
            for (index, start, stop), advantage in zip(session.turns, of_turns, strict=True):
                scores[index, start:stop] = float(advantage)
        return scores, out


def _before(r: Rollouts, of_responses: Sequence[Sequence[tuple[int, int, int]]]) -> list[Hashable]:
    """Of a further response nobody knows the prompt here: its first turn is like no other."""
    found: list[Hashable] = []
    for place, turns in enumerate(of_responses):
        found += [f"response {turns[0][0]}" if place else ()] * bool(turns)
        found += [tuple(r.responses[one[0]][one[2] : after[1]].tolist()) for one, after in pairwise(turns)]
    return found


@register("turn_rloo")
class TurnRloo(TurnMethod):
    """Unbiased, as shown by enumeration, at gamma=1 and with a loss that divides by a constant: either baseline reads
    the siblings alone, and nothing is divided by a deviation. Responses of one turn get RLOO's advantage."""

    formula = "A_k = G_k - mean of G_k over the siblings with a turn k, G_k the return from turn k on"
    source = "this project; verl#7244 describes the bias that it avoids"
    gamma: float = option(1.0, GAMMA, ge=0, le=1)
    stopped: Literal["left_out", "zero"] = option(
        "left_out",
        "siblings that have stopped before a turn: left_out of its mean, or counted as zero; both are unbiased",
    )

    def advantages(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        returns = [session.returns(self.gamma, outcome=self.outcome) for session in sessions]
        siblings, longest = max(1, len(returns) - 1), max(map(len, returns))
        g = np.array([np.pad(of, (0, longest - len(of))) for of in returns])
        counts = np.array([np.arange(longest) < len(of) for of in returns]).sum(axis=0) - 1
        sums = g.sum(axis=0) - g
        mean = sums / siblings
        if self.stopped == "left_out":  # where no sibling has the turn, the mean of their first ones
            mean = np.where(counts > 0, sums / counts.clip(min=1), mean[:, :1])
        a = g - mean
        a[abs(a) <= 1e-13 * abs(g).max()] = 0.0  # rounding: siblings with the same returns have 0, and are left out
        return [a[place, : len(of)] for place, of in enumerate(returns)]


@register("mt_grpo")
class MtGrpo(TurnMethod):
    """The first turn is credited with what the calls earned, all turns with the outcome. Biased where later turns call
    too, as shown by enumeration. Responses of one turn get GRPO's advantage."""

    formula = (
        "A_1 = norm(O) + alpha norm(T), later norm(O), without a call norm(T + O); T the calls' rewards, O the outcome"
    )
    source = (
        "arXiv 2505.11821, by its authors' code (SiliangZeng/Multi-Turn-RL-Agent, "
        "`verifiers/trainers/mt_grpo_env_trainer.py`, `_assign_advantages` with `aae`)"
    )
    alpha: float = option(1.0, "how much the rewards by turn count for the first turn", ge=0)
    deviation: bool = option(True, DEVIATION)

    def advantages(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        def norm(values: Sequence[float]) -> list[float]:
            each, one = [np.array([value]) for value in values], [["response"]] * len(values)
            return [float(of[0]) for of in compare(each, one, deviation=self.deviation, epsilon=1e-4)]

        t = [float(s.rewards[:-1].sum()) for s in sessions]
        o = [s.rewards[-1] + (s.outcome if self.outcome else 0.0) for s in sessions]
        found = []
        for s, of_t, of_o, both in zip(sessions, norm(t), norm(o), norm(np.add(t, o).tolist()), strict=True):
            found.append(np.full(len(s.rewards), of_o))
            found[-1][0] = of_o + self.alpha * of_t if len(s.rewards) > 1 else both
        return found


@register("gigpo")
class Gigpo(TurnMethod):
    """GRPO's advantage, plus that of a turn among the group's turns after the same message, by its token ids. Biased
    where the policy decides when to stop. Responses of one turn get ``1 + omega`` times GRPO's advantage. Its authors'
    code observes the environment alone, groups similar texts if asked, keeps the raw score of a group of one session,
    and counts a session once for each of its turns in the group's mean (``run_search.sh``)."""

    formula = "A_k = A + omega (G_k - mean) / deviation, over the group's turns after the same observation"
    source = (
        "arXiv 2505.10978, by its authors' code (langfengQ/DrMAS at 3b556f2, `gigpo/core_gigpo.py`, which names "
        "equations 3 and 5 to 8 of the paper; defaults of its `examples/gigpo_trainer/run_search.sh`)"
    )
    reads = TurnMethod.reads | {"messages"}
    omega: float = option(1.0, "how much the comparison after the same observation counts", ge=0)
    gamma: float = option(0.95, GAMMA, ge=0, le=1)
    deviation: bool = option(True, DEVIATION)

    def advantages(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        sums = [s.returns(1.0, outcome=self.outcome)[:1] for s in sessions]
        episode = compare(sums, [["session"]] * len(sums), deviation=self.deviation)
        returns = [s.returns(self.gamma, outcome=self.outcome) for s in sessions]
        step = compare(returns, [s.before for s in sessions], deviation=self.deviation)
        return [e + self.omega * of for e, of in zip(episode, step, strict=True)]


@register("gtpo")
class Gtpo(TurnMethod):
    """Biased where the policy decides when to stop: the mean holds the session's own return. Responses of one turn get
    GRPO's advantage; a turn that no other session has gets 0."""

    formula = "A_k = (G_k - mean) / deviation, G_k the discounted return, over the group's sessions with a turn k"
    source = (
        "arXiv 2511.14846, of which the abstract was read; the formula and gamma are those of a published summary of "
        "arXiv 2604.02869 (there equation 2), the comparison by place is chosen here"
    )
    gamma: float = option(0.9, GAMMA, ge=0, le=1)
    deviation: bool = option(True, DEVIATION)

    def advantages(self, sessions: Sequence[Session]) -> list[np.ndarray]:
        returns = [s.returns(self.gamma, outcome=self.outcome) for s in sessions]
        return compare(returns, [range(len(of)) for of in returns], deviation=self.deviation)


def turn_advantages(
    rewards: Sequence[Rewards],
    outcomes: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    method: str | TurnMethod = "turn_rloo",
    sessions: Sequence[Hashable] | None = None,
    before: Sequence[Sequence[Hashable]] | None = None,
    keys: Sequence[str] | None = None,
    **options: Any,
) -> list[list[float]]:
    """An advantage for each turn of each row, for any trainer. Two conversations of one prompt, the first of three
    turns:

    >>> turn_advantages([[0.5, [1.0, 1.0], None], [0.0]], outcomes=[1.0, 0.0], groups=["p", "p"])
    [[3.5, 3.0, 1.0], [-3.5]]

    A row is one sample of the trainer. Where a conversation has several, they have the same session and are in order:
    their turns follow each other, and the last row's outcome counts once.

    Args:
        rewards: of each row's turns, as many entries as the model took turns.
        outcomes: each row's own reward, which counts with the last turn; ``None`` for 0.
        groups: which rows answer the same prompt.
        method: of turns, by name or with its options: ``turn_rloo``, ``mt_grpo``, ``gtpo``, ``gigpo`` or a registered
            one.
        sessions: which rows are one conversation; by default each is one.
        before: what was observed before each turn of each row, for ``gigpo``.
        keys: names of the rows, for messages; by default their places.
        options: of a method by name, such as ``gamma=0.9``; ``differences=True`` for scores of states.

    Returns:
        A list of the length of each row's rewards; 0 for a conversation with a number that is not finite, which is
        warned of.

    Raises:
        ValueError: an argument that does not fit, naming it and the row.
    """
    lists = {"outcomes": outcomes, "groups": groups, "sessions": sessions, "before": before, "keys": keys}
    for name, values in lists.items():
        if values is not None and len(values) != len(rewards):
            raise ValueError(f"{name} must be one a row, {len(rewards)} of them; got {len(values)}")
    for row, of in enumerate(rewards):
        if not isinstance(of, list | tuple | np.ndarray):
            raise ValueError(
                f"rewards: row {row} has {of!r}; give it a list with an entry for each turn, None for none"
            )
    m = build(method, options) if isinstance(method, str) else method
    if not isinstance(m, TurnMethod):
        raise ValueError(f"method={method!r} gives no advantages of turns; choose one of turns, such as 'turn_rloo'")
    if m.control != "none":
        raise ValueError(
            f"control={m.control!r} moves advantages among a response's tokens; here are none, leave it out"
        )
    if "messages" in m.reads and before is None:
        raise ValueError(f"{m.name} compares turns after the same observation; pass before=")
    rows_of: dict[Hashable, list[int]] = defaultdict(list)
    for row in range(len(rewards)):
        rows_of[(groups[row], sessions[row]) if sessions is not None else row].append(row)
    there, given = [rows for rows in rows_of.values() if any(len(rewards[row]) for row in rows)], []
    for rows in there:
        key, last = str(rows[-1] if keys is None else keys[rows[-1]]), rows[-1]
        of_rows, counts = [rewards[row] for row in rows], [len(rewards[row]) for row in rows]
        given.append((key, groups[last], float(outcomes[last] or 0.0), of_rows, counts, "turns"))
        observed = sum(counts) if before is None else sum(len(before[row]) for row in rows)
        if observed != sum(counts):
            raise ValueError(f"before: row {key} has {sum(counts)} turns and {observed} observations; give one a turn")
    members, out = m.sessions(given, "rewards: row")
    for reason in out.values():
        logger.warning("%s: a row trains nothing: %s", m.name, reason)
    if before is not None:
        seen = {place: [one for row in there[place] for one in before[row]] for place in members}
        members = {place: replace(session, before=seen[place]) for place, session in members.items()}
    found = [[0.0] * len(of) for of in rewards]
    for place, of_session in zip(members, m.by_groups(list(members.values())), strict=True):
        left = iter(np.asarray(of_session, dtype=np.float64).tolist())
        for row in there[place]:
            found[row] = [next(left) for _ in rewards[row]]
    return found


def turns_to_tokens(advantages: Sequence[float], mask: Sequence[int]) -> list[float]:
    """A row's turn advantages on its tokens, by the mask of those that the model wrote. ValueError: another number of
    turns.

    >>> turns_to_tokens([3.5, -1.0], [1, 1, 0, 0, 1])
    [3.5, 3.5, 0.0, 0.0, -1.0]
    """
    ranges, values = runs(np.asarray(mask)), [0.0] * len(mask)
    if len(ranges) != len(advantages):
        raise ValueError(
            f"mask has {len(ranges)} turns, runs of tokens that the model wrote; advantages {len(advantages)}"
        )
    for (start, stop), advantage in zip(ranges, advantages, strict=True):
        values[start:stop] = [float(advantage)] * (stop - start)
    return values
