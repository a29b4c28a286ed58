"""Real-time RL: the users of a product teach the model that serves them."""
