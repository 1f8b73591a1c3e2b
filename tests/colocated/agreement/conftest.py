"""The scripts of processes are no modules of tests."""

collect_ignore = ["deaths.py", "divergent.py", "injections.py", "local_results.py"]
