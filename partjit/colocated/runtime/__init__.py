"""The runtime of colocated calls: streams and threads, pending arrays, failures, and what interrupts cannot break."""
