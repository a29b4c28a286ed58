"""Production mode: the gateway in front of a product's users, which records their sessions with
their consent, and their feedback."""
