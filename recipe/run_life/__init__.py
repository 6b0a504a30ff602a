"""The life of a run: it may be killed, resumes exactly, and says why it ended; see README.md in this folder."""
