"""Views of a run for people, folded from its events. Nothing depends on them."""
