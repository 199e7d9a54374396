"""What people look at: tokens in colour, charts and the report of a run, as HTML and SVG; nothing here computes results."""
