"""One model definition, run by the trainer and by the engine alike, so that their log-probs
agree."""
