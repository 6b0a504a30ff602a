"""GRAIL: token-level credit assignment for reinforcement learning with verifiable rewards."""
