"""Options of signals and reshapers: fields of a pydantic model that have a description.

The declaration is all there is: the checks at construction, the section of a run's configuration and the tables of the
documentation follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo


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
            first = error.errors()[0]
            info = type(self).model_fields[str(first["loc"][0])]
            why = info.json_schema_extra["why"] if isinstance(info.json_schema_extra, dict) else ""
            raise ValueError(
                f"{self.section}.{first['loc'][0]}={first['input']!r} {first['msg'].removeprefix('Input ')}{why and '; '}{why}"
            ) from None
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
