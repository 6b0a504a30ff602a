"""An experiment, not installed with the package: token weights compared where the step that went wrong is known."""
