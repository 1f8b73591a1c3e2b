"""The scripts of processes are no modules of tests."""

collect_ignore = [
    "before_programs.py",
    "deaths.py",
    "divergent.py",
    "injections.py",
    "local_results.py",
    "moved_results.py",
]
