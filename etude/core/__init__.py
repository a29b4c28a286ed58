"""The pure core: it decides, and never acts. No clock, lock, file, await, torch or web in here."""
