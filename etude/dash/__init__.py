"""What a person sees of a run: views folded from its events. Nothing depends on them."""
