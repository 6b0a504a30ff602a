"""Hydra's file of the options below ``algorithm`` that verl lacks: ``pkg://grail_advantage/verl_ext/config``."""
