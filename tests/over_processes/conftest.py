"""The modules of the script of a process are no modules of tests."""

collect_ignore = ["main.py", "searched.py", "started.py", "pieces.py", "programs.py", "calls.py"]
