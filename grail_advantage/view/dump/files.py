"""The earlier place of :func:`grail_advantage.dump.store.read_dump`; stays for a release."""

from grail_advantage.dump.store import read_dump

__all__ = ["read_dump"]
