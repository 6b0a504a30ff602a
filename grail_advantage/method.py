"""A method is one class, registered by name. A field is an option that a run sets as ``algorithm.<method>.<field>``; a
class variable says what the method needs. It knows no trainer and keeps nothing between batches. Modules of other
packages come by the entry-point group ``grail_advantage.methods``; ``grail_advantage.signals`` is its earlier name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from grail_advantage.maps import MAPS, STRICT, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grail_advantage.data import Rollouts, Row, RowScores
    from grail_advantage.model.interface import Model

# The files of methods/
FAMILIES = ("fitted", "oar", "policy", "rlsd", "saliency", "shear", "signed", "text", "turns")
METHODS: dict[str, type[BaseMethod]] = {}
FAILURES: dict[str, Exception] = {}  # plug-ins that raised when they were imported
RESERVED = ("token_weights", "token_dump")  # sections of ``algorithm`` that belong to the trainer
READS = (
    "old_log_probs",
    "entropy",
    "ref_log_probs",
    "groups",
    "examples",
    "tokens",
    "rewards",
    "sessions",
    "messages",
    "tokenizer",
)
USES = ("", "saliency", "logits", "sequences", "log_probs", "hidden_states")
_Class = TypeVar("_Class", bound="type[BaseMethod]")
Gate = Literal["wrong", "correct", "all"]
Among = Literal["response", "reasoning"]
Span = Literal["first", "last"]
Control = Literal["none", "shuffled", "answer"]


class NameTakenError(ValueError): ...


def plain_value(value: Any) -> Any:
    """Make a number of numpy's, as configurations of searches have them, one of Python's."""
    return value.item() if isinstance(value, np.generic) else value


def option(default: Any, text: str, **bounds: Any) -> Any:
    """Declare a field with a text for the documentation; type and bounds (``gt``, ``ge``, ``le``) are checked at
    start-up."""
    return Field(default, description=text, **bounds)


def register(name: str, **fixed: Any) -> Callable[[_Class], _Class]:
    """Make a class the meaning of ``algorithm.adv_estimator=<name>``, with the options ``fixed`` set. Its section is
    the first name unless it sets ``section`` itself. ValueError: a name that is taken or no identifier, unknown
    needs."""

    def of_class(cls: _Class) -> _Class:
        if not name.isidentifier() or name in RESERVED:
            raise ValueError(f"{name!r} must be an identifier, and not of {RESERVED}")
        if not (isinstance(cls, type) and issubclass(cls, Method | AdvantageMethod)):
            raise ValueError(f"{cls!r} must be a class of Method or AdvantageMethod")
        first = METHODS.get(name)  # a class comes again where its module is loaded again
        if first and (first.__module__, first.__qualname__) != (cls.__module__, cls.__qualname__):
            raise NameTakenError(
                f"method {name!r} is registered already, by {first.__module__}; choose another name"
            )
        words = {word for word in cls.reads if not word.startswith("field:")}
        if isinstance(cls.uses, str):  # a property where options set it
            words.add(cls.uses)
        unknown = words - {*READS, *USES}
        if unknown:
            raise ValueError(f"{cls.__name__} reads or uses {unknown}; choose of {(*READS, *USES)}")
        # vars(): a derived class must not have the names of the class that it derives from.
        cls.names = {**vars(cls).get("names", {}), name: fixed}
        # The first name stays, as the decorator of the next finds it here.
        cls.section = vars(cls).get("section", name)
        METHODS[name] = cls
        return cls

    return of_class


@cache
def _load_plugins() -> None:
    for family in FAMILIES:
        import_module(f"grail_advantage.methods.{family}")
    for entry in [
        *entry_points(group="grail_advantage.methods"),
        *entry_points(group="grail_advantage.signals"),
    ]:
        try:
            entry.load()
        except Exception as error:  # it stops no other, and no run without it
            FAILURES[f"{entry.name} ({entry.value})"] = error


def methods() -> dict[str, type[BaseMethod]]:
    """Give all registered classes by name, those of other packages, too."""
    _load_plugins()
    return dict(METHODS)


def build(name: str, options: Mapping[str, Any] | None = None) -> BaseMethod:
    """Give the method of a name with these options; ``None`` stands for a default. ValueError: an unknown method or
    option, one that the name sets, or a value that is not allowed."""
    registered = methods()
    if name not in registered:
        names = ", ".join(sorted(registered))
        raise ValueError(f"{name!r} is no method; choose one of {names}{failure_message()}")
    cls = registered[name]
    fixed = cls.names[name]
    options = options or {}
    for option_name in fixed:
        if options.get(option_name) is not None:
            raise ValueError(
                f"{cls.section}.{option_name} is set by algorithm.adv_estimator: {cls.names}"
            )
    return cls(**{**options, **fixed})


def failure_message() -> str:
    """Give the plug-ins that failed, as the end of a message; empty where none did."""
    return "".join(
        f"; the plug-in {name} failed to import: {type(error).__name__}: {error}"
        for name, error in FAILURES.items()
    )


class BaseMethod(BaseModel):
    """It has what every method has; a method derives from :class:`Method`, which gives weights, or from
    :class:`AdvantageMethod`. For each batch :func:`grail_advantage.weigh.weigh` calls :meth:`select`, with ``uses``
    :meth:`prepare` and :meth:`run`, then :meth:`scores`. They are pure, and may be called several times. ValueError: an
    option or a value that is not allowed, naming it; ``None`` stands for a default."""

    model_config = STRICT

    names: ClassVar[dict[str, dict[str, Any]]] = {}  # and the options that each name sets
    section: ClassVar[str] = "options"  # of a run's configuration, below ``algorithm``
    formula: ClassVar[str] = ""  # the weight in one line of plain text
    source: ClassVar[str] = ""  # where the method comes from, and how well that is known
    # On top of GRPO's step, in forwards over the batch; a backward to an activation is one
    cost: ClassVar[str] = "0"
    reads: ClassVar[frozenset[str]] = frozenset()  # of READS, and "field:NAME"
    # Of the data set, of a method that reads "examples"
    data_columns: ClassVar[tuple[str, ...]] = ()
    uses: ClassVar[str] = ""  # of the model, by run(); of USES
    # run() must see the selected responses of a group together
    whole_groups: ClassVar[bool] = False
    ranks_entropy: ClassVar[bool] = False  # coarse values of the entropy would matter
    metrics: ClassVar[
        dict[str, str]
    ] = {}  # names and meanings of what scores() puts into Rollouts.figures
    if TYPE_CHECKING:
        span: Span  # which complete answer of a response counts; an option where answers matter

    mask_truncated: bool = option(
        True, "whether a response that hit the length limit gets advantage 0"
    )

    def __init__(self, /, **options: Any) -> None:
        options = {name: plain_value(value) for name, value in options.items() if value is not None}
        try:
            super().__init__(**self.completed(options))
        except ValidationError as error:
            raise ValueError(message_of(error, self.section, type(self))) from None
        self.check()

    @classmethod
    def completed(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Add the options that follow from others; none is checked here."""
        return options

    def check(self) -> None:
        """Refuse combinations; each option alone is valid here."""

    def __hash__(self) -> int:
        # An option may be a dict, as reshaper_options, which has no hash.
        return hash((type(self), self.model_dump_json()))

    @property
    def name(self) -> str:
        """Give the name in ``algorithm.adv_estimator``; ValueError for a class that is not registered."""
        for name, fixed in vars(type(self)).get("names", {}).items():
            if all(getattr(self, key) == value for key, value in fixed.items()):
                return name
        raise ValueError(
            f"{type(self).__name__} is no registered method; put @register('a_name') on the class"
        )

    @property
    def field_names(self) -> list[str]:
        """Give the fields that it reads; a method may take them from an option of its own."""
        return sorted(
            word.removeprefix("field:") for word in self.reads if word.startswith("field:")
        )

    @property
    def skips_unanswered(self) -> bool:
        """Tell whether responses without an answer have weight 1."""
        return False

    @property
    def reads_answer(self) -> bool:
        """Tell whether a response's weights depend on its answer."""
        return False

    @property
    def needs_tokenizer(self) -> bool:
        """Tell whether the rollouts must have their tokenizer; one that is loaded for a model's pass is not meant."""
        return self.reads_answer or "tokenizer" in self.reads

    @property
    def lacks(self) -> str:
        """Name an option that has no default and must be set, with the remedy; empty where nothing is missing."""
        return ""

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ValueError, naming the remedy, for a tokenizer that the method cannot work with."""

    def inside_gate(self, r: Rollouts) -> Tensor:
        """Say at which responses the method looks, bool (B,), as far as their advantage decides that."""
        return torch.ones_like(r.valid)

    def select(self, r: Rollouts) -> Tensor:
        """Say which responses need scores, bool (B,). Leaving the others out is exact: their token advantages do not
        depend on scores."""
        raise NotImplementedError(f"{type(self).__name__} has no select()")

    def prepare(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
        """Give the row as the pass needs it: cut, or with another prompt. Runs where the tokenizer is, before rows are
        shared out."""
        return row

    def row_cost(self, row: Row) -> int:
        """Estimate the cost of a prepared row compared with other rows, for sharing them out."""
        return len(row.tokens)

    def run(self, rows: Sequence[Row], model: Model) -> list[RowScores]:
        """Compute the scores of these rows, in their order, where the model is. With a sharded model a collective:
        every rank calls it with as many rows, and must make the same calls of ``model`` in the same order, whatever its
        rows hold."""
        raise NotImplementedError(
            f"{type(self).__name__} names uses={self.uses!r} and has no run()"
        )

    def scores(self, r: Rollouts, of_pass: Tensor | None) -> Tensor:
        """Give scores (B, T), by default ``of_pass``, what :meth:`run` gave, NaN elsewhere. They are read in
        selected responses."""
        if of_pass is None:
            raise NotImplementedError(
                f"{type(self).__name__} uses nothing of the model and has no scores()"
            )
        return of_pass


class Method(BaseMethod):
    """It is the base of the methods that give weights: ``A_t = w_t A``. A response that is not selected, or has a score
    or weight that is not finite, has weight 1. A class for which one of these options means nothing takes it away:
    ``control: ClassVar[str] = "none"``."""

    needs_answer: ClassVar[bool] = False  # responses without an answer have weight 1
    # Every response with a token is scored: the batch's tokens are compared
    whole_batch: ClassVar[bool] = False

    gate: Gate = option("all", "responses that get weights: wrong (A <= 0), correct (A > 0) or all")
    statistics: Among = option(
        "response", "tokens scored and compared: all, or the reasoning before the answer"
    )
    span: Span = option("last", "which complete answer of a response counts")
    normalize_mass: bool = option(
        False, "whether a response's weighed tokens have weights that sum to their number"
    )
    control: Control = option(
        "none",
        "shuffled: the same weights, on other scored tokens of the same response; answer: the "
        "answer's weights alone, for methods that have them",
    )

    def __init__(self, /, **options: Any) -> None:
        super().__init__(**options)
        if self.control == "answer" and self.answer_weights() is None:
            raise ValueError(
                f"{self.section}.control='answer': the method gives answers no weight of their own; use shuffled"
            )
        if self.whole_batch and self.gate != "all":
            raise ValueError(
                f"{self.section}.gate={self.gate!r}: the tokens of the whole batch are compared; leave it out"
            )

    @property
    def skips_unanswered(self) -> bool:
        return self.needs_answer or (
            self.statistics == "reasoning" and self.answer_weights() is None
        )

    @property
    def reads_answer(self) -> bool:
        return self.skips_unanswered or self.answer_weights() is not None

    def answer_weights(self) -> tuple[float, float, bool] | None:
        """Give weights from each answer on, whatever the scores there: of its content; of its boundary and everything
        after it; whether answers outside the gate get them, too. ``None``: the map's ``elsewhere``."""
        return None

    def inside_gate(self, r: Rollouts) -> Tensor:
        if self.gate == "all":
            return super().inside_gate(r)
        return (r.advantages > 0) == (self.gate == "correct")

    def select(self, r: Rollouts) -> Tensor:
        if self.whole_batch:
            return r.valid
        # A weight times an advantage of 0 is 0, whatever the weight.
        chosen = self.inside_gate(r) & (r.advantages != 0) & r.valid
        if self.needs_answer:
            chosen &= r.answered
        if self.statistics == "reasoning" and self.answer_weights() is None:
            # An answer at the first token has no reasoning before it.
            chosen &= r.bounds[:, 0] > 0
        return chosen

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        """Turn scores (B, T), finite among the compared tokens, to weights. ``among``, bool (B, T), are those, of scored
        responses. There is at least one such token; scores are 1 where they are not known."""
        raise NotImplementedError(
            f"{type(self).__name__} has no weights(); derive it from Mapped, or write one"
        )


class AdvantageMethod(BaseMethod):
    """It is the base of the methods whose :meth:`scores` are token advantages, of either sign. A response that is not
    selected has its own advantage on every token."""

    span: ClassVar[Span] = "last"  # type: ignore[misc]
    control: Literal["none", "shuffled"] = option(
        "none",
        "shuffled: the same advantages, on other steps (runs of equal ones) of the same response before its answer",
    )
    # With the response's own advantage, where a score is not finite; else 0
    non_finite_trains: ClassVar[bool] = True

    def select(self, r: Rollouts) -> Tensor:
        return r.trains


class Mapped(Method):
    """It is a method whose scores go through a map that the user chooses. The map also gets the method's own options of
    its options' names."""

    reshaper: str = option("log_zscore", "map from scores to weights")
    reshaper_options: dict[str, Any] = option({}, "options of the map")

    def check(self) -> None:
        # One score is mapped, so that a start refuses what the map would refuse in the first batch.
        score = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        self._map(score, score.bool())

    def map_options(self) -> dict[str, Any]:
        """Say what the chosen map gets beside ``reshaper_options``."""
        names = MAPS[self.reshaper].options.model_fields.keys() & type(self).model_fields.keys()
        return {name: getattr(self, name) for name in names}

    def weights(self, scores: Tensor, among: Tensor, r: Rollouts) -> Weights:
        return self._map(scores, among)

    def _map(self, scores: Tensor, among: Tensor) -> Weights:
        if self.reshaper not in MAPS:
            remedy = f"choose one of {', '.join(sorted(MAPS))}{failure_message()}"
            raise ValueError(f"{self.section}.reshaper={self.reshaper!r} is unknown; {remedy}")
        function, options, _ = MAPS[self.reshaper]
        values = self.map_options()
        for name, value in self.reshaper_options.items():
            values[name] = plain_value(value)
        try:
            return function(scores, among, **options(**values).model_dump())
        except ValidationError as error:
            raise ValueError(
                message_of(error, f"{self.section}.reshaper_options", options)
            ) from None


def message_of(error: ValidationError, section: str, cls: type[BaseModel]) -> str:
    """Put the first error into a sentence that names the option."""
    first = error.errors()[0]
    location = first["loc"]
    name = f"{section}.{'.'.join(map(str, location))}"
    if first["type"] != "extra_forbidden":
        return f"{name}={first['input']!r} {first['msg'].removeprefix('Input ')}"
    option_name = location[0]
    hint = ""
    owners = {owner.section for owner in METHODS.values() if option_name in owner.model_fields}
    if owners:
        hint = f" but one of {', '.join(sorted(owners))}"
    maps = [key for key, entry in MAPS.items() if option_name in entry.options.model_fields]
    if maps and "reshaper_options" in cls.model_fields:
        hint = f" but of the map {maps[0]}, by reshaper_options"
    return f"{name} is not an option{hint}; the options are {', '.join(cls.model_fields) or 'none'}"
