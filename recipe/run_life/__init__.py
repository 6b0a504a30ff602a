"""Fault tolerance: a run may be killed, resumes exactly, and says why it ended; see docs/fault_tolerance.md."""
