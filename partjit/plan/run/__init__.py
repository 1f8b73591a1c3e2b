"""Running plans: compiled, linked, executed, observed, remembered."""
