"""A task and a model small enough to train with reinforcement learning on two CPU cores."""
