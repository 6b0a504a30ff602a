"""Explain what tokens received by parts: what differs between the loss that ran and the one that was intended.

A part changes a column (shifted, of other responses, reversed, a power), the ratio, the clip or the KL term, for all responses
or some; after the parts come one factor (or one by micro-batch, by response), an added term, and the tokens that got nothing.
Explanations are compared by their length in bits: that of the parts and of their free parameters, and some for each token that
is left over. The shortest is taken, then parts are put to it as long as they shorten it.

Shape suffixes: N responses of all optimiser steps, T response tokens, V judged positions, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from .changes import Change, Changes
from .endings import Endings
from .judged import FEW, LEFT, State, Told
from .losses import Tokens

DEPTH, BEAM = 3, 2


class Explainer(Endings, Changes):
    """Finds the shortest explanation of a batch."""

    def told(self, state: State) -> list[tuple[str, str, float, torch.Tensor]]:
        """An explanation's name, sentence, size and (N, T) positions, part by part."""
        result = [(part.name, part.what, part.size, part.at_NT) for part in state.told]
        result += [(name, what, size, self.spread(at_V)) for name, what, size, at_V in state.end.told]
        rest = self.rest(state)
        if rest is None:
            return result
        at_V = state.end.rest_V
        if result and (count := int(at_V.sum())) < FEW * int(self.wrong_V.sum()):
            name, what, *place = max(result, key=lambda told: int(told[3].sum()))
            at = next(place for place, told in enumerate(result) if told[0] == name and told[1] == what)
            result[at] = (name, f"{what}; {count} tokens received something else", *place)
            return result
        if rest[0] == "stale":  # which the clip takes or leaves by another ratio
            of_clip = [
                told
                for told in state.end.told
                if told[0] in ("lost", "unclipped") and told[0] not in state.end.patterns
            ]
            result = [told for told in result if told[0] not in {name for name, *_ in of_clip}]
            at_V = torch.stack([at_V, *(told[3] for told in of_clip)]).any(dim=0)
        return [*result, (*rest, self.spread(at_V))]

    def explain(self) -> tuple[State, list[State]]:
        """The shortest explanation, and others that explain as much and are about as short."""
        root = State(self.trained.tokens, self.loss, self.intended_NT)
        root.end = self.close(root)
        best, beam, states = root, [root], [root]
        if root.end.left_bits < 1 and all(name.startswith("scaled") for name, *_ in root.end.told):
            return root, []
        for _ in range(DEPTH):
            children = [child for state in beam for child in self._children(state)]
            if not children:
                break
            children.sort(key=lambda pair: pair[0])
            beam = []
            for _, child in children[: 2 * BEAM]:
                child.end = self.close(child)
                beam.append(child)
            beam = sorted(beam, key=lambda state: state.total)[:BEAM]
            states += beam
            if beam[0].total > best.total - max(4, 0.1 * best.end.left_bits):
                break
            best = beam[0]
            if best.end.left_bits < 24:
                break
        if best.end.rest_V.any():
            return best, []
        alike = [
            state
            for state in states
            if state is not best
            and not state.end.rest_V.any()
            and state.end.small_V.sum() <= best.end.small_V.sum()
            and state.total <= 1.3 * best.total + 8
        ]
        return best, sorted(alike, key=lambda state: state.total)

    def _children(self, state: State) -> Iterator[tuple[float, State]]:
        """Explanations with one part more: for all responses, or for those that it fits better."""
        bases = [state.end.base_V, state.end.factor_V] if state.end.free else [state.end.base_V]
        changes = list(self._changes(state))
        for base_V in bases:
            yield from self._with_base(state, changes, base_V)

    def _with_base(
        self, state: State, changes: Sequence[Change], base_V: torch.Tensor
    ) -> Iterator[tuple[float, State]]:
        """Likewise, by what they leave after a factor of each position."""
        value_V = state.value_NT[self.at]
        _, before_V = self._quick(value_V, base_V)
        for change in changes:
            other_NT = change.value_NT
            if other_NT is None:
                other_NT = self.trained.expected(change.loss, change.tokens)[0]
            other_V = other_NT[self.at]
            changed_V = self._off(value_V, other_V)
            if not (changed_V & self.wrong_V).any():
                continue
            free_NT = change.free_NT if state.free_NT is None else state.free_NT
            free_V = None if free_NT is None else free_NT[self.at]
            quick, after_V = self._quick(other_V, base_V, free_V)
            if free_V is not None:
                after_V = torch.where(free_V, before_V, after_V)
            yield state.bits + change.bits + quick, self._child(state, change, other_NT, free_NT, change.bits, "")
            if change.loss is not state.loss:
                continue
            n_V, count = self.at[0], len(self.trained.rows_N)
            saved_N = torch.zeros(count, dtype=torch.float64).index_add_(0, n_V, before_V - after_V)
            better_N, differs_N = saved_N > LEFT, torch.zeros(count, dtype=torch.bool)
            differs_N[n_V[changed_V]] = True
            if not better_N.any() or bool((better_N | ~differs_N).all()):
                continue
            own, what, *_ = self.pattern(better_N[n_V] & changed_V, changed_V, each=6.0)
            own = min(own, 4 + 8.0 * float(better_N.sum()))
            chosen_N1 = better_N.unsqueeze(1)
            mixed_NT = torch.where(chosen_N1, other_NT, state.value_NT)
            free_NT = None if free_NT is None else free_NT & chosen_N1
            quick, _ = self._quick(mixed_NT[self.at], base_V, None if free_NT is None else free_NT[self.at])
            tokens = Tokens(
                *(
                    None if a is None or b is None else torch.where(chosen_N1, a, b)
                    for a, b in zip(vars(change.tokens).values(), vars(state.tokens).values(), strict=True)
                )
            )
            where = what or f"{int(better_N.sum())} of {count} responses"
            child = self._child(state, replace(change, tokens=tokens), mixed_NT, free_NT, change.bits + own, where)
            yield state.bits + change.bits + own + quick, child

    def _child(
        self,
        state: State,
        change: Change,
        value_NT: torch.Tensor,
        free_NT: torch.Tensor | None,
        bits: float,
        where: str,
    ) -> State:
        size_NT = torch.maximum(value_NT.abs(), state.value_NT.abs()) + self.unit
        at_NT = (value_NT - state.value_NT).abs() > self.trained.precision * size_NT
        what = change.what + (f", in {where}" if where else "")
        return State(
            change.tokens,
            change.loss,
            value_NT,
            state.bits + bits,
            (*state.told, Told(change.name, what, change.size, at_NT)),
            (*state.kinds, change.kind),
            free_NT,
        )
