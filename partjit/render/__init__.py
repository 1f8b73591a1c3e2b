"""Drawing: plain data in, SVG, HTML or text out. It depends on nothing else of the package."""
