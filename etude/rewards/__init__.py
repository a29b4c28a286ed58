"""Rewards: verdicts on attempts. A verdict comes from a sandbox that the agent never touched, and
is reached on the host's side of its walls."""
