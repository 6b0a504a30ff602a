"""A method: its options, what it reads, which responses it scores, and its scores' way to weights.

One class, registered by name. A field is an option that a run sets as ``algorithm.<method>.<field>``; a class variable says what
the method needs. It knows no trainer and keeps nothing between batches. Other packages' modules are imported by the
entry-point group ``grail_advantage.signals``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, Field, ValidationError

from grail_advantage.maps import MAPS, STRICT, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grail_advantage.data import Rollouts, Row, RowScores
    from grail_advantage.model.interface import Model

METHODS: dict[str, type[Method]] = {}
"""The classes by name. :func:`methods` has those of other packages, too."""
FAILURES: dict[str, Exception] = {}
"""Plug-ins that raised when they were imported."""
RESERVED = ("token_weights", "token_dump")
"""Sections of ``algorithm`` that belong to the trainer."""
READS = ("old_log_probs", "entropy", "groups", "examples", "tokens", "rewards", "sessions", "messages")
USES = ("", "saliency", "logits", "sequences", "log_probs", "hidden_states")

_Class = TypeVar("_Class", bound="type[Method]")


class NameTakenError(ValueError):
    """Two classes want the same name."""


def option(default: Any, text: str, **bounds: Any) -> Any:
    """A field with a text for the documentation; its annotation and bounds (``gt``, ``ge``, ``le``) are checked at start-up."""
    return Field(default, description=text, **bounds)


def register(name: str, **fixed: Any) -> Callable[[_Class], _Class]:
    """Make a class the meaning of ``algorithm.adv_estimator=<name>``. A class may have several names.

    Args:
        name: also the section of its options, unless the class itself sets ``section``.
        fixed: options that the name sets.

    Raises:
        ValueError: the name is taken or no identifier, or the class says what nobody knows.
    """

    def of_class(cls: _Class) -> _Class:
        if not name.isidentifier() or name in RESERVED:
            raise ValueError(f"method {name!r}: the name must be an identifier, and none of {', '.join(RESERVED)}")
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise ValueError(f"method {name!r}: derive {cls!r} from grail_advantage.Method")
        known = METHODS.get(name)  # a class comes again where its module is loaded again
        if known and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise NameTakenError(f"method {name!r} is registered already, by {known.__module__}; choose another name")
        for kind, words, of in (("reads", READS, cls.reads), ("uses", USES, [cls.uses])):
            if unknown := [word for word in of if isinstance(word, str) and word not in words and word[:6] != "field:"]:
                raise ValueError(f"{cls.__name__}.{kind}: {unknown[0]!r} is unknown; choose of {', '.join(words)}")
        cls.names = {**vars(cls).get("names", {}), name: fixed}
        cls.section = vars(cls).get("section", name)
        METHODS[name] = cls
        return cls

    return of_class


@cache
def _load_plugins() -> None:
    """One that fails stops no other, and no run without it."""
    import_module("grail_advantage.methods")
    for entry in entry_points(group="grail_advantage.signals"):
        try:
            entry.load()
        except Exception as error:
            FAILURES[f"{entry.name} ({entry.value})"] = error


def methods() -> dict[str, type[Method]]:
    """All registered classes by name."""
    _load_plugins()
    return dict(METHODS)


def build(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """The method of a name with these options; ``None`` stands for a default.

    Raises:
        ValueError: an unknown method or option, one that the name sets, or a value that is not allowed.
    """
    known = methods()
    if name not in known:
        raise ValueError(f"{name!r} is no method; choose one of {', '.join(sorted(known))}{failure_message()}")
    cls, fixed = known[name], known[name].names[name]
    for key, value in (options or {}).items():
        if key in fixed and value is not None:
            raise ValueError(
                f"{cls.section}.{key}={value!r}: the name sets it; choose algorithm.adv_estimator of {cls.names}"
            )
    return cls(**{**(options or {}), **fixed})


def failure_message() -> str:
    """The plug-ins that failed, as the end of a message; empty where none did."""
    return "".join(f"; the plug-in {name} failed to import: {type(e).__name__}: {e}" for name, e in FAILURES.items())


class Method(BaseModel):
    """Base of every method.

    For each batch :func:`grail_advantage.weigh.weigh` calls :meth:`select`, with ``uses`` :meth:`prepare` and :meth:`run`,
    then :meth:`scores` and :meth:`weights`. They may be called several times and must be pure.

    Raises:
        ValueError: an option or a value that is not allowed, naming it.
    """

    model_config = STRICT

    names: ClassVar[dict[str, dict[str, Any]]] = {}
    """The names of the class, and the options that each of them sets."""
    section: ClassVar[str] = "options"
    """Of its options in a run's configuration, below ``algorithm``."""
    formula: ClassVar[str] = ""
    """The weight in one line of plain text, for the page of all methods; like ``source``, where it comes from and how well that is
    known, and ``cost``, on top of GRPO's step in forwards over the batch (a backward to an activation counts as one)."""
    source: ClassVar[str] = ""
    cost: ClassVar[str] = "0"
    reads: ClassVar[frozenset[str]] = frozenset()
    """Of :data:`READS`, and ``field:NAME``."""
    data_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the data set that it reads, of a method that reads ``examples``."""
    uses: ClassVar[str] = ""
    """Of the model, by :meth:`run`; of :data:`USES`."""
    gives: ClassVar[Literal["weights", "advantages"]] = "weights"
    """``advantages``: :meth:`scores` are token advantages of either sign; :meth:`weights` is not called."""
    without_scores: ClassVar[Literal["base", "nothing"]] = "base"
    """With advantages: a selected response with a score that is not finite gets its own advantage, or 0."""
    needs_answer: ClassVar[bool] = False
    """Whether responses without an answer have weight 1."""
    whole_batch: ClassVar[bool] = False
    """Whether every response with a token is scored, since the tokens of the whole batch are compared."""
    whole_groups: ClassVar[bool] = False
    """Whether :meth:`run` must see the selected responses of a group together."""
    ranks_entropy: ClassVar[bool] = False
    """Whether coarse values of the entropy would matter."""

    gate: Literal["wrong", "correct", "all"] = option(
        "all", "responses that get weights: wrong (advantage <= 0), correct (advantage > 0) or all"
    )
    statistics: Literal["response", "reasoning"] = option(
        "response", "tokens that are scored and compared: the whole response, or the reasoning before the answer"
    )
    span: Literal["first", "last"] = option("last", "which complete answer of a response counts")
    normalize_mass: bool = option(False, "whether a response's weighed tokens have weights that sum to their number")
    mask_truncated: bool = option(True, "whether a response that hit the length limit gets advantage 0")

    def __init__(self, /, **options: Any) -> None:
        given = self.completed({name: value for name, value in options.items() if value is not None})
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ValueError(message_of(error, self.section, type(self))) from None
        if self.gives == "advantages" and (self.gate, self.statistics, self.normalize_mass) != (
            "all",
            "response",
            False,
        ):
            raise ValueError(f"{self.section}: gate, statistics and normalize_mass are for weights; leave them out")
        if self.whole_batch and self.gate != "all":
            raise ValueError(
                f"{self.section}.gate={self.gate!r}: the tokens of the whole batch are compared; leave it out"
            )
        self.check()

    @classmethod
    def completed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The options with those that follow from them; none is checked here."""
        return given

    def check(self) -> None:
        """Refuse combinations; each option alone is valid here."""

    def replace(self, **changes: Any) -> Self:
        """A copy with other values for some options; ValueError as the constructor."""
        return type(self)(**{**self.model_dump(), **changes})

    @property
    def name(self) -> str:
        """In ``algorithm.adv_estimator``.

        Raises:
            ValueError: the class is not registered.
        """
        for name, fixed in vars(type(self)).get("names", {}).items():
            if all(getattr(self, key) == value for key, value in fixed.items()):
                return name
        raise ValueError(f"{type(self).__name__} is no registered method; put @register('a_name') on the class")

    @property
    def field_names(self) -> list[str]:
        """The fields that it reads; a method may take them from an option of its own."""
        return sorted(word.removeprefix("field:") for word in self.reads if word.startswith("field:"))

    @property
    def skips_unanswered(self) -> bool:
        """Whether responses without an answer have weight 1."""
        return self.needs_answer or (self.statistics == "reasoning" and self.answer_weights() is None)

    @property
    def reads_answer(self) -> bool:
        """Whether a response's weights depend on its answer."""
        return self.skips_unanswered or self.answer_weights() is not None

    def answer_weights(self) -> tuple[float, float, bool] | None:
        """Weights from each answer on, whatever the scores there: of its content, of its boundary and everything after it, and
        whether the answers of responses outside the gate get them too. ``None``: the map's ``elsewhere``."""
        return None

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """ValueError, naming the remedy, for a tokenizer that the method cannot work with."""

    def inside_gate(self, r: Rollouts) -> torch.Tensor:
        """bool (B,)"""
        positive = r.advantages > 0
        return {"wrong": ~positive, "correct": positive, "all": torch.ones_like(positive)}[self.gate]

    def select(self, r: Rollouts) -> torch.Tensor:
        """bool (B,): responses that need scores: inside the gate, with an answer where one is needed, a token that trains and an
        advantage that is not 0. Leaving the others out is exact: their token advantages do not depend on scores."""
        if self.whole_batch:
            return r.valid
        chosen = self.inside_gate(r) & (r.advantages != 0) & r.valid
        if self.needs_answer:
            chosen &= r.answered
        if self.statistics == "reasoning" and self.answer_weights() is None:
            chosen &= r.bounds[:, 0] > 0
        return chosen

    def prepare(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
        """The row as the pass needs it: cut, or with another prompt. Runs where the tokenizer is, before rows are shared out."""
        return row

    def row_cost(self, row: Row) -> int:
        """Of a prepared row compared with others, for sharing them out."""
        return len(row.tokens)

    def run(self, rows: Sequence[Row], model: Model) -> list[RowScores]:
        """Scores of these rows, in their order, where the model is. With a sharded model a collective: every rank calls it with as
        many rows, and must make the same calls of ``model`` in the same order, whatever its rows hold."""
        raise NotImplementedError(f"{type(self).__name__} names uses={self.uses!r} and has no run()")

    def scores(self, r: Rollouts, of_pass: torch.Tensor | None) -> torch.Tensor:
        """float (B, T), read in selected responses only. A response has weight 1 where a token of its statistics set has none that
        is finite.

        Args:
            r: with the columns that the method reads.
            of_pass: what :meth:`run` gave, NaN elsewhere; ``None`` for a method that uses nothing of the model.
        """
        if of_pass is None:
            raise NotImplementedError(f"{type(self).__name__} uses nothing of the model and has no scores()")
        return of_pass

    def weights(self, scores: torch.Tensor, among: torch.Tensor, r: Rollouts) -> Weights:
        """Scores to weights.

        Args:
            scores: finite where ``among`` is true, and in the scored responses of a method with answer weights; 1 elsewhere.
            among: bool (B, T), the tokens of scored responses that are compared.
            r: as for :meth:`scores`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights(); derive it from Mapped, or write one")


class Mapped(Method):
    """A method whose scores go through a map that the user chooses. Its own options that have the name of one of the map's are
    handed on."""

    reshaper: str = option("log_zscore", "map from scores to weights, by its name")
    reshaper_options: dict[str, Any] = option({}, "options of the map, by their names in its own table")

    def check(self) -> None:
        one = torch.ones(1, 1)
        self._map(one, one.bool())

    def map_options(self) -> dict[str, Any]:
        """What the chosen map gets beside ``reshaper_options``."""
        return {
            name: getattr(self, name)
            for name in MAPS[self.reshaper].options.model_fields
            if name in type(self).model_fields
        }

    def weights(self, scores: torch.Tensor, among: torch.Tensor, r: Rollouts) -> Weights:
        return self._map(scores, among)

    def _map(self, scores: torch.Tensor, among: torch.Tensor) -> Weights:
        where = f"{self.section}.reshaper"
        if self.reshaper not in MAPS:
            known = ", ".join(sorted(MAPS))
            raise ValueError(f"{where}={self.reshaper!r} is unknown; choose one of {known}{failure_message()}")
        function, options, _ = MAPS[self.reshaper]
        try:
            return function(scores, among, **options(**{**self.map_options(), **self.reshaper_options}).model_dump())
        except ValidationError as error:
            raise ValueError(message_of(error, f"{where}_options", options)) from None


def message_of(error: ValidationError, section: str, cls: type[BaseModel]) -> str:
    """The first error in a sentence that names the option."""
    first = error.errors()[0]
    name = f"{section}.{'.'.join(map(str, first['loc']))}"
    if first["type"] == "extra_forbidden":
        maps = [known for known, of in MAPS.items() if first["loc"][0] in of.options.model_fields]
        hint = f" (of the map {maps[0]}: reshaper_options)" if maps and "reshaper_options" in cls.model_fields else ""
        return f"{name} is not an option{hint}; the options are {', '.join(cls.model_fields) or 'none'}"
    return f"{name}={first['input']!r} {first['msg'].removeprefix('Input ')}"
