#!/usr/bin/env bash
# In place of the interpreter: prints DRY_RUN and its arguments, each closed by a NUL byte.
printf "%s\0" "$DRY_RUN" "$@"
