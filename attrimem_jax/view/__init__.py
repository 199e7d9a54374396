"""What people look at: coloured tokens, charts and the report of a run, as HTML and SVG; it computes no results."""
