"""What runs colocated calls: streams and threads, arrays whose values come later, and what interrupts cannot break."""
