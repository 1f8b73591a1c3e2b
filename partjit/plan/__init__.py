"""Programs with colocated calls: cut into fragments and calls, planned, verified and run."""
