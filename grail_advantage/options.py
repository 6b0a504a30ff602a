"""Options of signals and reshapers: fields of a pydantic model that have a description.

The declaration is all there is: the checks at construction, the section of a run's configuration and the tables of the
documentation follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

KINDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a finite number",
    "object": "a mapping of options",
    "string": "a text",
}
"""Types of JSON schema in words."""


def option(
    default: Any,
    description: str,
    *,
    gt: float | None = None,
    ge: float | None = None,
    le: float | None = None,
    why: str = "",
) -> Any:
    """A field of an :class:`Options` class that a run may set; its annotation says which values there are.

    Args:
        default: the default; ``None`` where :meth:`Options.completed` fills it in, or where the annotation allows it.
        description: for the documentation; of a number also its unit or what it is relative to.
        gt: bound that a number must exceed.
        ge: least number allowed.
        le: greatest number allowed.
        why: why the bounds are there, or what to do instead; ends the message of a number outside them.
    """
    return Field(default, description=description, gt=gt, ge=ge, le=le, json_schema_extra={"why": why})


class Options(BaseModel):
    """Base of every class of options. ``None`` stands for an option's default.

    A field without a description is no option: the class sets it, and the constructor refuses it.

    Raises:
        ValueError: a value that is not allowed, at construction; the message names the option and the fix.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    section: ClassVar[str] = "options"
    """Section of the options in a run's configuration, below ``algorithm``; for messages."""

    def __init__(self, /, **options: Any) -> None:
        known = option_fields(type(self))
        for name in options:
            if name not in known:
                listed = ", ".join(known) or "none"
                raise ValueError(f"{self.section}.{name} is not an option; the options are {listed}")
        given = {name: value for name, value in options.items() if value is not None}
        try:
            super().__init__(**self.completed(given))
        except ValidationError as error:
            raise ValueError(_message(type(self), error)) from None
        self.check()

    def __hash__(self) -> int:
        return hash((type(self), *(value for value in self.as_dict().values() if not isinstance(value, dict))))

    @classmethod
    def completed(cls, options: dict[str, Any]) -> dict[str, Any]:
        """The options with the fields that follow from them; none is checked here."""
        return options

    def check(self) -> None:
        """Refuse combinations; each option alone is valid here."""

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Build from a mapping such as the section of a run's configuration; ValueError as the constructor."""
        return cls(**{str(name): value for name, value in options.items()})

    def as_dict(self) -> dict[str, Any]:
        """All options by name."""
        return {name: getattr(self, name) for name in option_fields(type(self))}

    def replace(self, **changes: Any) -> Self:
        """A copy with other values for some options; ValueError as the constructor."""
        return self.from_dict({**self.as_dict(), **changes})


def option_fields(cls: type[Options]) -> dict[str, FieldInfo]:
    """The options of a class by name."""
    return {name: info for name, info in cls.model_fields.items() if info.description}


def option_schemas(cls: type[Options]) -> dict[str, dict[str, Any]]:
    """The JSON schema of each option of a class; that of the values beside ``None`` where ``None`` is one."""
    schemas = cls.model_json_schema()["properties"]
    return {name: {**schemas[name], **schemas[name].get("anyOf", [{}])[0]} for name in option_fields(cls)}


def _message(cls: type[Options], error: ValidationError) -> str:
    """The first of pydantic's errors in the words of a run's configuration."""
    first = error.errors()[0]
    name, kind, given = str(first["loc"][0]), first["type"], first["input"]
    rule = option_schemas(cls)[name]
    low, high = rule.get("minimum"), rule.get("maximum")
    value = f"{cls.section}.{name}={float(given) if rule['type'] == 'number' and type(given) is int else given!r}"
    if kind == "literal_error":
        return f"{value} is unknown; choose one of {', '.join(map(str, rule['enum']))}"
    if kind == "greater_than":
        required = f"greater than {rule['exclusiveMinimum']}"
    elif rule["type"] == "integer" and kind != "less_than_equal":
        return f"{value} must be a whole number{'' if low is None else f', at least {low}'}"
    elif kind not in ("greater_than_equal", "less_than_equal"):
        return f"{value} must be {KINDS[rule['type']]}"
    elif low is not None and high is not None:
        required = f"between {low} and {high}"
    else:
        required = f"at most {high}" if low is None else f"at least {low}"
    return f"{value} must be {required}{rule['why'] and '; '}{rule['why']}"
