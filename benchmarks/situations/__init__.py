"""Situations of users for `everyday.py`: each one with every way of today to handle it."""
