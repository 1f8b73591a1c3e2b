"""What XLA made of a program: its text read, its collectives found, its complaints caught."""
