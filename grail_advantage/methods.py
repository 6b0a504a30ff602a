"""The methods that a run can name, and how one is built from the options of its section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grail_advantage.options import option_fields
from grail_advantage.registry import failure_message, reshapers, signals
from grail_advantage.signals.base import Signal


@dataclass(frozen=True)
class Method:
    """A registered signal: the meaning of ``algorithm.adv_estimator=<name>``."""

    name: str
    signal_class: type[Signal]

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Options that the name itself sets."""
        return self.signal_class.names[self.name]

    @property
    def section(self) -> str:
        """Section of its options, below ``algorithm``."""
        return self.signal_class.section

    def build(self, options: Mapping[str, Any]) -> Signal:
        """The signal with these options.

        Raises:
            ValueError: an option that the name sets, an unknown option or a value that is not allowed.
        """
        known = option_fields(self.signal_class)
        for name, value in options.items():
            if name in self.fixed and value is not None:
                names = self.signal_class.names.items()
                meanings = " and ".join(f"{other} means {fixed[name]}" for other, fixed in names)
                raise ValueError(
                    f"{self.section}.{name}={value!r} cannot be set in a run; algorithm.adv_estimator does it: {meanings}"
                )
            if name in known:
                continue
            maps = [map_name for map_name, reshaper in reshapers().items() if name in option_fields(reshaper)]
            if maps and "reshaper_options" in known:
                raise ValueError(
                    f"{self.section}.{name} is not an option of this method but of the reshaper {' or '.join(maps)}; set it in "
                    f"{self.section}.reshaper_options"
                )
            owners = {other.section for other in signals().values() if name in option_fields(other)}
            if owners:
                raise ValueError(
                    f"{self.section}.{name} is not an option; it is one of {', '.join(sorted(owners))}. The options of "
                    f"{self.section} are {', '.join(sorted(known))}"
                )
        return self.signal_class.from_dict({**options, **self.fixed})


def methods() -> dict[str, Method]:
    """All registered signals by name."""
    return {name: Method(name, signal_class) for name, signal_class in signals().items()}


def method(name: str) -> Method:
    """The signal that is registered under a name.

    Raises:
        ValueError: there is none; the message lists those that there are, and the plug-ins that failed to import.
    """
    known = methods()
    if name not in known:
        raise ValueError(
            f"{name!r} is no registered signal; choose one of {', '.join(sorted(known))}{failure_message()}"
        )
    return known[name]
