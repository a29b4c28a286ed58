"""The gateway in front of a product's users: what they consent to is recorded, and what they say of
it."""
