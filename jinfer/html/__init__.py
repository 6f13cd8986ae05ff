"""HTML and SVG: pages, tables, drawings and token texts that views and reports share."""
