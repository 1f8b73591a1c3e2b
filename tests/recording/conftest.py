"""The script of a process is no module of tests."""

collect_ignore = ["recording_process.py"]
