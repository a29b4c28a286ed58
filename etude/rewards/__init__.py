"""What an attempt was worth. A verdict comes from a sandbox that the agent never touched, and is
reached on this side of its walls."""
