"""The journal: which calls have been made, committed together with the state of the program, and played back."""
