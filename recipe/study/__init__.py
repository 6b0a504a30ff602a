"""A controlled comparison of token weights on a task where the step that went wrong is known."""
