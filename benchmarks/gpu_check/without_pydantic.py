"""This package on a machine without pydantic, for part a: options have their defaults, and nobody checks values.

:class:`grail_advantage.options.Options` is a pydantic model. While the package is imported, the classes below take pydantic's
place; part a builds methods whose options are valid. A test holds the options of every method against pydantic's.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, ClassVar


class FieldInfo:
    """A field's default and description."""

    def __init__(self, default: Any = None, description: str | None = None, **_: Any) -> None:
        self.default, self.description = default, description


class BaseModel:
    """Fields as pydantic finds them: annotated attributes of a class and of its bases. A type may bring the description."""

    model_fields: ClassVar[dict[str, FieldInfo]] = {}

    def __init_subclass__(cls) -> None:
        cls.model_fields = {}
        for base in reversed(cls.__mro__):
            for name, annotation in vars(base).get("__annotations__", {}).items():
                if annotation.startswith("ClassVar"):
                    continue
                value, kind = vars(base)[name], vars(sys.modules[base.__module__]).get(annotation)
                (info,) = getattr(kind, "__metadata__", (FieldInfo(),))
                cls.model_fields[name] = value if isinstance(value, FieldInfo) else FieldInfo(value, info.description)

    def __init__(self, **values: Any) -> None:
        for name, info in self.model_fields.items():
            setattr(self, name, values.get(name, info.default))


class ValidationError(ValueError):
    """Never raised."""


def import_package() -> None:
    """Import this package, with the classes above for pydantic's."""
    pydantic, fields = ModuleType("pydantic"), ModuleType("pydantic.fields")
    vars(pydantic).update(BaseModel=BaseModel, ConfigDict=dict, Field=FieldInfo, ValidationError=ValidationError)
    vars(fields)["FieldInfo"] = FieldInfo
    importlib.import_module("transformers")  # asks whether there is pydantic
    sys.modules |= {"pydantic": pydantic, "pydantic.fields": fields}
    try:
        importlib.import_module("grail_advantage.methods")
    finally:
        del sys.modules["pydantic"], sys.modules["pydantic.fields"]
