"""Hydra's file of the options below ``algorithm`` that verl does not have.

``hydra.searchpath=[pkg://grail_advantage/verl_ext/config]``
"""
