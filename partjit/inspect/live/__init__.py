"""What-if questions from a notebook: a widget with a field for each spec, beside what the program would cost."""
