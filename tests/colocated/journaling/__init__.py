"""Tests of the journal, and of playing it back."""
