"""Try settings of a run, each by several seeds or folds, and compare them."""
