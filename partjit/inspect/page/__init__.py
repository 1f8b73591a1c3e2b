"""A report as a page: plain HTML, which a script makes interactive."""
