"""Drawing: plain data in, SVG, HTML or text out. It knows nothing of programs, so anything may show itself with it."""
